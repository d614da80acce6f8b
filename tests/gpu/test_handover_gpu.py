"""Weights on their way: buckets that another process opens, by CUDA IPC on a GPU, and the bits of matrices in FP8."""

import secrets
import subprocess
import sys

import pytest
import torch

from meshrl_torch.wire import fp8
from meshrl_torch.wire.handover import Desk, Slots
from meshrl_torch.wire.locality import Where

READER = """
import sys
import torch
from meshrl_torch.wire import fp8
from meshrl_torch.wire.handover import Taking

device = torch.device(sys.argv[2])
with Taking(sys.argv[1], "key", "a", device, 600) as taking:
    taking.open()
    for number in range(12):
        assert (taking.bucket(0, number, 1 << 20) == number).all()
        taking.done()
"""


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_opens_the_buckets(kind: str) -> None:
    device = torch.device(kind)
    assert Where.of(device).opens(Where.of(device), kind == "cuda")
    name, slots = f"test-{secrets.token_hex(8)}", Slots(3, 1 << 20, device, shared=True)
    desk = Desk(name)
    with subprocess.Popen([sys.executable, "-c", READER, name, kind]) as reader:
        with desk.admit("key", ["a"], slots, 600) as handing:
            for number in range(12):
                handing.wait(["a"], number % 3)
                slots.tensor[number % 3] = number
                handing.give(["a"], 0, number, number % 3)
            for slot in range(3):
                handing.wait(["a"], slot)
        assert reader.wait() == 0


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),  # if some readers have their tensors in the host's memory
    ],
)
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
