"""The bytes of buckets: views of their parts, copies between devices, and fingerprints made on the device.

For a fingerprint, the bytes are integers of 64 bits, in rows of a prime length. Zeros fill the last row. The sums of
all columns, then of all rows, are v[0], v[1] and so on. The fingerprint is the sum of mixed(v[i] + k[i]), with keys
k[i] that look random. All sums are modulo 2^64, so a device may add in any order.

Sums only read, and run at the pace of a GPU's memory. Random damage goes unnoticed with a probability of 2^-64. Only
changes that cancel in every row and in every column are never seen.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from meshrl_torch.wire.manifest import Layout, Part

ALIGNED: Final = 64
"""Bytes. Each bucket and each part starts at a multiple."""
_BLOCK: Final = 1 << 20
"""Most bytes that are copied at once if torch makes temporary copies of them."""
_WIDTH: Final = 1021
"""Integers in a row. No power of two, because errors often come at such distances."""
_ROW: Final = 8 * _WIDTH
"""Bytes of a row."""
_ROWS: Final = 256
"""Number of rows that a CPU sums twice while they are in its cache: 2 MiB."""
_ROWS_ELSEWHERE: Final = 2048
"""Number of rows otherwise: 16 MiB."""
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Of SplitMix64 (Steele, Lea and Flood, 2014), as int64."""


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNED`."""
    return -(-nbytes // ALIGNED) * ALIGNED


def dtype_of(part: Part) -> torch.dtype:
    """Return the dtype of a part."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def nbytes_of(part: Part) -> int:
    """Return the size of a part in bytes."""
    return prod(part.shape) * dtype_of(part).itemsize


def view(buffer: Tensor, part: Part) -> Tensor:
    """Return a view of a part in a bucket."""
    flat = buffer[part.start : part.start + nbytes_of(part)]
    return flat.view(dtype_of(part)).reshape(part.shape)


def place_in(whole: Tensor, part: Part) -> Tensor:
    """Return a view of a part in the whole tensor."""
    place = whole.detach()
    for dim, (start, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
        place = place.narrow(dim, start, length)
    return place


def copy(place: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to its place, in that dtype.

    Between devices, torch makes temporary copies unless the bytes are the same and in order. Then blocks are copied.
    """
    in_order = place.dtype == tensor.dtype and place.is_contiguous() and tensor.is_contiguous()
    if in_order or place.device == tensor.device or tensor.nbytes <= _BLOCK:
        place.copy_(tensor)
    elif tensor[0].nbytes > _BLOCK:
        for pair in zip(place, tensor, strict=True):
            copy(*pair)
    else:
        rows = _BLOCK // tensor[0].nbytes
        for block, source in zip(place.split(rows), tensor.split(rows), strict=True):
            block.copy_(source)


def bytes_in_place(layout: Layout, tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Return the bytes of a bucket that is one tensor, in its own memory. None if they must be staged.

    `tensors`: the source or the place of each part.
    """
    if len(layout.parts) != 1:
        return None
    (tensor,) = tensors
    same = (tensor.dtype, tensor.device.type) == (dtype_of(layout.parts[0]), device.type)
    return tensor.detach().reshape(-1).view(torch.uint8) if same and tensor.is_contiguous() else None


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a contiguous tensor, int64[], on its device. The host waits for nothing."""
    octets = tensor.reshape(-1).view(torch.uint8)
    end = len(octets) // _ROW * _ROW
    rest = pad(octets[end:], (0, -len(octets) % 8)).view(torch.int64)
    columns = torch.zeros(_WIDTH, dtype=torch.int64, device=tensor.device)
    columns[: len(rest)] += rest
    sums = [columns]
    for block in octets[:end].split(_ROW * (_ROWS if tensor.device.type == "cpu" else _ROWS_ELSEWHERE)):
        at_word = block.clone() if block.storage_offset() % 8 else block
        rows = at_word.view(torch.int64).view(len(block) // _ROW, _WIDTH)
        sums.append(rows.sum(1))  # first, because it reads memory faster; the other then reads a cache
        columns += rows.sum(0)
    numbers = torch.cat([*sums, rest.sum(0, keepdim=True)])
    return _mixed(numbers + _keys(tensor.device, len(numbers).bit_length())[: len(numbers)]).sum()


def _mixed(numbers: Tensor) -> Tensor:
    """Return other numbers, int64, one for each. Each bit of a result depends on all bits of its number."""
    for bits, factor in zip((30, 27), _FACTORS, strict=True):
        numbers = (numbers ^ _shifted(numbers, bits)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right. Zeros come in, not the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


@cache
def _keys(device: torch.device, bits: int) -> Tensor:
    """Return the first 2^bits keys, which are the numbers of SplitMix64."""
    steps = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mixed(torch.from_numpy(steps.view(np.int64))).to(device)
