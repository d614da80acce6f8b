"""Buckets of weights that another process opens: on a GPU by CUDA IPC, and in the host's memory by the same code."""

import secrets
import subprocess
import sys

import pytest
import torch

from meshrl_torch.wire.handover import Desk, Slots
from meshrl_torch.wire.locality import Where

READER = """
import sys
import torch
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
