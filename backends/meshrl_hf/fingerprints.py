"""Copies of tensors, and fingerprints of the copied bytes, made on their device. Engines' processes make them too.

The bytes are integers of 64 bits, in rows of a prime length. Zeros fill the last row. The sums of all columns, then of
all rows, are v[0], v[1] and so on. The fingerprint is the sum of (v[i] + (v[i] >> 32)) k[i] with odd k[i] that look
random. All sums are modulo 2^64, so a device may add in any order.

Sums only read. On a GPU they take no memory and run at the pace of its memory. Random damage goes unnoticed with a
probability of 2^-64. Only changes that cancel in every row and in every column are never seen.
"""

from collections.abc import Iterator
from functools import cache
from math import gcd, prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

_WIDTH: Final = 509
"""Integers in a row. No power of two, because errors often come at such distances."""
_ROWS: Final = 512
"""Number of rows that a CPU copies, and reads again while they are in its cache: 2 MiB."""
_ROWS_ELSEWHERE: Final = 4096
"""Number of rows that are copied at once otherwise: 16 MiB."""


def copied(place: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor to its place, in that dtype. Returns the fingerprint of the copied bytes, int64[], on its device.

    On one GPU, the host waits for nothing.
    """
    sums = _Sums(place.device)
    on_cpu = place.device.type == tensor.device.type == "cpu"
    rows = _ROWS if on_cpu else _ROWS_ELSEWHERE
    size = rows * _WIDTH * 8 // place.itemsize
    flat = place.is_contiguous() and tensor.is_contiguous()
    for block, source in zip(_blocks(place, size, flat=flat), _blocks(tensor, size, flat=flat), strict=True):
        sums.add(_integers(block.copy_(source)))
    return sums.fingerprint()


class _Sums:
    """The sums of rows and columns."""

    def __init__(self, device: torch.device) -> None:
        self._columns = torch.zeros(_WIDTH, dtype=torch.int64, device=device)
        self._rows: list[Tensor] = []
        self._rest = self._columns[:0]
        """The begin of the next row."""

    def add(self, integers: Tensor) -> None:
        """Add the next integers."""
        given = torch.cat([self._rest, integers]) if len(self._rest) else integers
        count = len(given) // _WIDTH
        rows = given[: count * _WIDTH].view(count, _WIDTH)
        self._columns += rows.sum(0)
        self._rows.append(rows.sum(1))
        self._rest = given[count * _WIDTH :]

    def fingerprint(self) -> Tensor:
        """Return the fingerprint, int64[]. Nothing can be added after that."""
        if len(self._rest):
            self.add(self._columns.new_zeros(_WIDTH - len(self._rest)))
        sums = torch.cat([self._columns, *self._rows])
        sums += sums >> 32  # else a highest bit would meet only the lowest bit of its key
        return (sums * _keys(sums.device, len(sums).bit_length())[: len(sums)]).sum()


def _blocks(tensor: Tensor, size: int, *, flat: bool) -> Iterator[Tensor]:
    """Yield pieces of about `size` elements. All but the last one have a multiple of eight."""
    if flat:
        yield from tensor.reshape(-1).split(size)
        return
    row = prod(tensor.shape[1:])
    step = 8 // gcd(8, row)
    yield from tensor.split(max(1, size // (row * step)) * step)


def _integers(block: Tensor) -> Tensor:
    """Return the bytes as int64[], in the block's memory if they are there in this form."""
    octets = block.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(octets) % 8
    if missing or octets.storage_offset() % 8:
        octets = torch.cat([octets, octets.new_zeros(missing)])
    return octets.view(torch.int64)


@cache
def _keys(device: torch.device, bits: int) -> Tensor:
    """Return the first 2^bits keys, by SplitMix64 (Steele, Lea and Flood, 2014)."""
    keys = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = keys ^ (keys >> np.uint64(31)) | np.uint64(1)
    return torch.from_numpy(keys.view(np.int64)).to(device)
