"""The fingerprint of bytes: what changes it, what does not, and that a GPU's tensors stay where they are."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from meshrl_hf.fingerprints import fingerprint

SIGN = -(1 << 15)
SHAPES = [(), (7,), (300, 2000), (999, 5), (3, 40_001), (0, 4), (4 * 1021,), (4 * 1020 + 1,)]


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_of_the_bytes_wherever_they_lie(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = whole(shape).to(dtype)
        known = fingerprint(tensor)
        assert (known.dtype, known.shape) == (torch.int64, ())
        shifted = torch.empty(tensor.numel() + 1, dtype=dtype)[1:].copy_(tensor.reshape(-1))  # at an odd offset
        assert fingerprint(tensor.clone()) == fingerprint(shifted) == known, shape
        # If neither numbers nor fingerprints ever arrive, both are zeros.
        assert fingerprint(torch.zeros(shape, dtype=dtype)) != 0, shape


DAMAGES: Mapping[str, Callable[[Tensor], object]] = {
    "a bit": lambda bits: bits[57, 3].bitwise_xor_(1),
    "two signs": lambda bits: bits[57, 3:8:4].bitwise_xor_(SIGN),
    "every fourth sign": lambda bits: bits[:, 3::4].bitwise_xor_(SIGN),
    # A sum that is linear in the bits misses one of 2^33 such pairs: this one.
    "two signs far apart": lambda bits: bits.view(-1)[4 * 341_841 + 1 :: 4 * 51_498][:2].bitwise_xor_(SIGN),
    "two rows swapped": lambda bits: bits[:2].copy_(bits[:2].flip(0)),
    "all shifted by one of the integers that are summed": lambda bits: bits.copy_(bits.roll(4)),
    "zeros": Tensor.zero_,
}


def test_damage_changes_it() -> None:
    for name, damage in DAMAGES.items():
        tensor = whole((1200, 2000)).bfloat16()
        known = fingerprint(tensor)
        damage(tensor.view(torch.int16))
        assert fingerprint(tensor) != known, name


def test_on_another_device_the_host_reads_nothing_of_the_tensor() -> None:
    """A tensor on torch's device "meta" refuses each copy to the host, and has no number to read."""
    made = fingerprint(torch.empty(8000, 5000, dtype=torch.bfloat16, device="meta"))
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.int64, ())
