"""Copies of tensors, and fingerprints of the copied bytes, made on their device. Engines' processes make them too.

The bytes are integers of 64 bits, in rows of a prime length. Zeros fill the last row. The sums of all columns, then of
all rows, are v[0], v[1] and so on. The fingerprint is the sum of mixed(v[i] + k[i]), with keys k[i] that look random.
All sums are modulo 2^64, so a device may add in any order.

Sums only read, and run at the pace of a GPU's memory. Random damage goes unnoticed with a probability of 2^-64. Only
changes that cancel in every row and in every column are never seen.
"""

from collections.abc import Iterator
from functools import cache
from math import gcd, prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

_WIDTH: Final = 1021
"""Integers in a row. No power of two, because errors often come at such distances."""
_ROWS: Final = 256
"""Number of rows that a CPU copies, and reads again while they are in its cache: 2 MiB."""
_ROWS_ELSEWHERE: Final = 2048
"""Number of rows that are copied at once otherwise: 16 MiB."""
_STRIDED: Final = 1 << 20
"""Bytes of a tensor's block that is not contiguous. Sums need a copy of it."""
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Of SplitMix64 (Steele, Lea and Flood, 2014), as int64."""


def copied(place: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor to its place, in that dtype. Returns the fingerprint of the copied bytes, int64[], on its device.

    On one GPU, the host waits for nothing.
    """
    sums = _Sums(place.device)
    on_cpu = place.device.type == tensor.device.type == "cpu"
    rows = _ROWS if on_cpu else _ROWS_ELSEWHERE
    flat = place.is_contiguous() and tensor.is_contiguous()
    size = (rows * _WIDTH * 8 if flat else min(rows * _WIDTH * 8, _STRIDED)) // place.itemsize
    for block, source in zip(_blocks(place, size, flat=flat), _blocks(tensor, size, flat=flat), strict=True):
        sums.add(_integers(block.copy_(source)))
    return sums.fingerprint()


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a contiguous tensor, int64[], on its device. The host waits for nothing."""
    sums = _Sums(tensor.device)
    rows = _ROWS if tensor.device.type == "cpu" else _ROWS_ELSEWHERE
    for block in _blocks(tensor, rows * _WIDTH * 8 // tensor.itemsize, flat=True):
        sums.add(_integers(block))
    return sums.fingerprint()


class _Sums:
    """The sums of rows and columns."""

    def __init__(self, device: torch.device) -> None:
        self._columns = torch.zeros(_WIDTH, dtype=torch.int64, device=device)
        self._rows: list[Tensor] = []
        self._rest = self._columns[:0]
        """The start of the next row."""

    def add(self, integers: Tensor) -> None:
        """Add the next integers."""
        if len(self._rest):
            row = torch.cat([self._rest, integers[: _WIDTH - len(self._rest)]])
            integers = integers[_WIDTH - len(self._rest) :]
            self._rest = row[len(row) // _WIDTH * _WIDTH :]
            self._add(row)
        self._add(integers)
        self._rest = torch.cat([self._rest, integers[len(integers) // _WIDTH * _WIDTH :]])

    def _add(self, integers: Tensor) -> None:
        """Add all whole rows."""
        count = len(integers) // _WIDTH
        if not count:
            return
        rows = integers[: count * _WIDTH].view(count, _WIDTH)
        self._rows.append(rows.sum(1))  # first, because it reads memory faster; the other then reads a cache
        self._columns += rows.sum(0)

    def fingerprint(self) -> Tensor:
        """Return the fingerprint, int64[]. Nothing can be added after that."""
        if len(self._rest):
            self._columns[: len(self._rest)] += self._rest
            self._rows.append(self._rest.sum(0, keepdim=True))
        sums = torch.cat([self._columns, *self._rows])
        return _mixed(sums + _keys(sums.device, len(sums).bit_length())[: len(sums)]).sum()


def _mixed(numbers: Tensor) -> Tensor:
    """Return other numbers, int64, one for each. Each bit of a result depends on all bits of its number."""
    for bits, factor in zip((30, 27), _FACTORS, strict=True):
        numbers = (numbers ^ _shifted(numbers, bits)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right. Zeros come in, not the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _blocks(tensor: Tensor, size: int, *, flat: bool) -> Iterator[Tensor]:
    """Yield pieces of about `size` elements. All but the last one have a multiple of eight."""
    if flat:
        yield from tensor.reshape(-1).split(size)
        return
    row = prod(tensor.shape[1:])
    if tensor.dim() > 2 and row > size and row % 8 == 0:
        for each in tensor:
            yield from _blocks(each, size, flat=False)
        return
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
    """Return the first 2^bits keys, which are the numbers of SplitMix64."""
    steps = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mixed(torch.from_numpy(steps.view(np.int64))).to(device)
