"""The fingerprint of bytes: what changes it, what does not, and that a GPU's tensors stay where they are."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from meshrl_hf.fingerprints import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

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


def flip(bits: Tensor) -> None:
    bits[57, 3] ^= 1


def flip_two_signs(bits: Tensor) -> None:
    bits[57, 3::4][:2] ^= -(1 << 15)


def flip_every_fourth_sign(bits: Tensor) -> None:
    bits[:, 3::4] ^= -(1 << 15)


def flip_two_signs_in_other_rows_and_columns(bits: Tensor) -> None:
    """A sum that is linear in the bits misses one of 2^33 such pairs: this one."""
    bits.view(-1)[[4 * 341_841 + 1, 4 * 393_339 + 1]] ^= -(1 << 15)


def swap_two_rows(bits: Tensor) -> None:
    bits[[0, 1]] = bits[[1, 0]]


def shift(bits: Tensor) -> None:
    bits.copy_(bits.roll(4))  # by one of the integers that are summed


def test_damage_changes_it() -> None:
    damages: list[Callable[[Tensor], object]] = [
        flip, flip_two_signs, flip_every_fourth_sign, flip_two_signs_in_other_rows_and_columns, swap_two_rows, shift,
        Tensor.zero_,
    ]  # fmt: skip
    for damage in damages:
        tensor = whole((1200, 2000)).bfloat16()
        known = fingerprint(tensor)
        damage(tensor.view(torch.int16))
        assert fingerprint(tensor) != known, damage.__name__


def test_on_another_device_the_host_reads_nothing_of_the_tensor() -> None:
    """A tensor on torch's device "meta" refuses each copy to the host, and has no number to read."""
    made = fingerprint(torch.empty(8000, 5000, dtype=torch.bfloat16, device="meta"))
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.int64, ())
