"""Make the buckets of a broadcast: which parts of a rank's tensors are in each, and their bytes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_bytes import ALIGNED, aligned, copy, nbytes_of, view
from meshrl_torch.wire.manifest import FP8, SCALE, Layout, Part


class Piece(NamedTuple):
    """A part of a tensor that goes into a bucket."""

    parts: Sequence[Part]
    """The part, or for rows of a matrix in FP8: their scales, and the rows."""
    tensor: Tensor
    dtype: torch.dtype
    """The dtype to which the tensor is rounded first."""

    @property
    def end(self) -> int:
        """The offset in bytes after the last part."""
        return self.parts[-1].start + nbytes_of(self.parts[-1])

    def at(self, start: int) -> "Piece":
        """Return the piece at another offset in bytes."""
        return self._replace(parts=[part._replace(start=start + part.start) for part in self.parts])

    def write(self, memory: Tensor) -> None:
        """Write the parts to a bucket's memory, uint8[nbytes]."""
        places = [view(memory, part) for part in self.parts]
        if len(places) == 1:
            copy(places[0], self.tensor)
        else:
            scales, rows = places
            fp8.write(self.tensor, self.dtype, scales, rows)


class OutgoingBucket(NamedTuple):
    """A bucket before it is sent."""

    layout: Layout
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "OutgoingBucket":
        """Make it of pieces with their offsets."""
        return cls(Layout(tuple(part for piece in pieces for part in piece.parts), pieces[-1].end), pieces)

    def write(self, memory: Tensor) -> None:
        """Write the parts to memory, uint8[nbytes]."""
        for piece in self.pieces:
            piece.write(memory)


def make_buckets(
    boxes: Iterable[Box],
    dtype: torch.dtype,
    limit: int,
    matrices: Collection[str] = frozenset(),
    is_wide: Callable[[str], bool] = lambda _: False,
) -> list[OutgoingBucket]:
    """Make buckets of at most `limit` bytes. Larger tensors are split.

    `matrices`: names of those that are sent in FP8, where a box has whole rows of them. `is_wide`: True for the names
    of those that are sent in float32. A piece of at least half of the
    limit is its own bucket: unless it is in FP8, it needs no staging on a side that has it contiguous.
    """
    buckets, pieces, end = list[OutgoingBucket](), list[Piece](), 0
    for box in boxes:
        in_fp8 = box.name in matrices and _has_whole_rows(box, limit)
        own = torch.float32 if is_wide(box.name) else dtype
        for piece in _rows_in_fp8(box, dtype, limit) if in_fp8 else _cut(box, own, limit):
            if piece.end >= limit // 2:
                buckets.append(OutgoingBucket.of([piece]))
                continue
            start = aligned(end)
            if pieces and start + piece.end > limit:
                buckets.append(OutgoingBucket.of(pieces))
                pieces, start = [], 0
            pieces.append(piece.at(start))
            end = start + piece.end
    return [*buckets, OutgoingBucket.of(pieces)] if pieces else buckets


def _cut(box: Box, dtype: torch.dtype, limit: int) -> Iterator[Piece]:
    """Cut a box into pieces of at most `limit` bytes."""
    name = str(dtype).removeprefix("torch.")
    for offsets, tensor in _pieces(box.tensor.detach(), box.offsets, limit // dtype.itemsize):
        yield Piece([Part(box.name, box.size, offsets, tuple(tensor.shape), 0, name)], tensor, dtype)


def _has_whole_rows(box: Box, limit: int) -> bool:
    """True if a matrix's box needs no other rank for the scales of its rows, and a bucket holds a row."""
    return box.tensor.shape[1] == box.size[1] and _most_rows(box, limit) > 0


def _most_rows(box: Box, limit: int) -> int:
    """Return how many rows in FP8 a bucket holds, with their scales."""
    return (limit - ALIGNED) // (box.size[1] + torch.float32.itemsize)


def _rows_in_fp8(box: Box, dtype: torch.dtype, limit: int) -> Iterator[Piece]:
    """Cut whole rows into pieces of at most `limit` bytes."""
    most = _most_rows(box, limit)
    for start in range(0, len(box.tensor), most):
        rows = box.tensor.detach()[start : start + most]
        first, count = box.offsets[0] + start, len(rows)
        scales = Part(f"{box.name}{SCALE}", (box.size[0], 1), (first, 0), (count, 1), 0, "float32")
        numbers = Part(box.name, box.size, (first, 0), tuple(rows.shape), aligned(nbytes_of(scales)), FP8)
        yield Piece([scales, numbers], rows, dtype)


def _pieces(
    tensor: Tensor, offsets: tuple[int, ...], numel: int, dim: int = 0
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Split a tensor along `dim`, and along later dims only if a row has more than `numel` elements."""
    if dim == tensor.dim():
        yield offsets, tensor
        return
    row = prod(tensor.shape[dim + 1 :])
    rows = max(1, numel // max(1, row))
    for start in range(0, tensor.shape[dim], rows):
        piece = tensor.narrow(dim, start, min(rows, tensor.shape[dim] - start))
        place = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        if row > numel:
            yield from _pieces(piece, place, numel, dim + 1)
        else:
            yield place, piece
