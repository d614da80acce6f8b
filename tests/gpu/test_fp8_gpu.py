"""Matrices that a GPU rounds to FP8: the bits of a CPU, wherever they are written."""

import pytest
import torch

from meshrl_torch.wire import fp8

KINDS = pytest.mark.parametrize(
    ("kind", "to"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),  # if some readers have their tensors in the host's memory
    ],
)


@KINDS
def test_rows_have_the_same_bits_on_all_devices(kind: str, to: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(300, 700) * torch.logspace(-9, 9, 300)[:, None]
    matrix[7] = 0
    for dtype in (torch.float32, torch.bfloat16):
        numbers, scales = fp8.quantized(matrix.to(dtype))
        found = torch.empty_like(numbers, device=to), torch.empty_like(scales, device=to)
        fp8.write(matrix.to(kind), dtype, found[1], found[0])
        assert torch.equal(found[1].cpu(), scales)
        assert torch.equal(found[0].cpu().view(torch.uint8), numbers.view(torch.uint8))
