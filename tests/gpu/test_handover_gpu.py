"""Weights on their way: buckets that another process opens, by CUDA IPC on a GPU, and the bits of matrices in FP8."""

import secrets
import subprocess
import sys

import pytest
import torch

from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_server import BucketServer, Slots
from meshrl_torch.wire.plan import Locality

READER = """
import sys
import torch
from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_server import BucketClient

device = torch.device(sys.argv[2])
with BucketClient(sys.argv[1], "key", "a", device, 600) as client:
    client.open()
    for number in range(12):
        assert (client.bucket(0, number, 1 << 20) == number).all()
        client.done()
"""


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_opens_the_buckets(kind: str) -> None:
    device = torch.device(kind)
    assert Locality.of(device).opens(Locality.of(device), kind == "cuda")
    name, slots = f"test-{secrets.token_hex(8)}", Slots(3, 1 << 20, device, shared=True)
    server = BucketServer(name)
    with subprocess.Popen([sys.executable, "-c", READER, name, kind]) as reader:
        with server.admit("key", ["a"], slots, 600) as connections:
            for number in range(12):
                connections.wait(["a"], number % 3)
                slots.tensor[number % 3] = number
                connections.give(["a"], 0, number, number % 3)
            for slot in range(3):
                connections.wait(["a"], slot)
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
