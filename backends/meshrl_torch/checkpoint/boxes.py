"""Rectangular parts of tensors, and safetensors files of them. Any layout of ranks reads what another one wrote.

The format is that of torch's `HuggingFaceStorageWriter`: a file for each rank, which names its part of each tensor.
Whole tensors, as in a Hugging Face folder, are one part. Nothing is pickled.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshrl.errors import ModelError

_METADATA: Final = {"DCP_VERSION": "1.0", "format": "pt"}
_PARTS: Final = "DCP_SHARDING_INFO"
"""The metadata key that torch's reader looks for."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangle: the first index of each dim, and the one after the last."""


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor."""

    name: str
    size: tuple[int, ...]
    """Size of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the rectangle in the tensor."""
    tensor: Tensor
    """The rectangle, as a view: writing to it changes its source."""

    @property
    def ranges(self) -> Ranges:
        """The ranges of the whole tensor that it covers."""
        return _ranges(self.offsets, self.tensor.shape)


def write_boxes(file: Path, boxes: Iterable[Box]) -> None:
    """Write a safetensors file, and wait until it is on the disk. Without boxes, no file is written.

    Boxes of one name must form one rectangle. Raises ModelError if the file cannot be written.
    """
    together: dict[str, list[Box]] = {}
    for box in boxes:
        together.setdefault(box.name, []).append(box)
    joined = {name: _joined(each) for name, each in together.items()}
    if not joined:
        return
    parts = {name: {"saved_offsets": box.offsets} for name, box in joined.items()}
    tensors = {name: box.tensor for name, box in joined.items()}
    try:
        save_file(tensors, file, metadata={**_METADATA, _PARTS: json.dumps(parts)})
        with file.open("rb") as written:
            os.fsync(written.fileno())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file.parent} cannot be written: {type(error).__name__}: {error}") from error


class Boxes:
    """The parts of tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Find the parts. SafetensorError, OSError, KeyError or ValueError if a file is damaged."""
        self._folder = folder
        self._parts: dict[str, dict[Ranges, Path]] = {}
        self._elements: Counter[str] = Counter()
        self.files: Final = sorted(folder.glob("*.safetensors"))
        for file in self.files:
            for name, ranges in _heads(file):
                self._parts.setdefault(name, {}).setdefault(ranges, file)
                self._elements[name] += _count(ranges)
        self.sizes: Final[Mapping[str, tuple[int, ...]]] = {
            name: tuple(max(end for _, end in dim) for dim in zip(*parts, strict=True))
            for name, parts in self._parts.items()
        }
        """The size of each whole tensor, as far as its parts show."""

    def overlaps(self, name: str) -> bool:
        """True if files contain elements of a tensor of `sizes` more than once."""
        return self._elements[name] > prod(self.sizes[name]) - sum(map(_count, self.missing(name)))

    def missing(self, name: str) -> list[Ranges]:
        """Return the rectangles of a tensor of `sizes` that no file contains."""
        return self._found(name, tuple((0, length) for length in self.sizes[name]))[1]

    def read(self, boxes: Iterable[Box]) -> None:
        """Fill each box's tensor, in its dtype, from the files. Nothing else is read from them.

        ModelError, before any copy, if files lack part of a box. Also if a file cannot be read to its end: then some
        boxes are filled.
        """
        plan: dict[Path, list[tuple[Box, Ranges, Ranges]]] = {}
        for box in boxes:
            self._check(box)
            for file, part, ranges in self._found(box.name, box.ranges)[0]:
                plan.setdefault(file, []).append((box, part, ranges))
        try:
            with torch.no_grad():
                for file, copies in plan.items():
                    _copy(file, copies)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._folder} cannot be read: {type(error).__name__}: {error}") from error

    def _check(self, box: Box) -> None:
        size = self.sizes.get(box.name)
        if size is None:
            raise ModelError(f"the files of {self._folder} lack the tensor `{box.name}`")
        if size != box.size:
            raise ModelError(f"the files of {self._folder} have `{box.name}` as {list(size)}, not {list(box.size)}")
        if lacking := self._found(box.name, box.ranges)[1]:
            part = ", ".join(f"{start}:{end}" for start, end in lacking[0])
            raise ModelError(f"the files of {self._folder} lack the part [{part}] of `{box.name}`, {list(size)}")

    def _found(self, name: str, ranges: Ranges) -> tuple[list[tuple[Path, Ranges, Ranges]], list[Ranges]]:
        """Find a rectangle: the files with its parts, the part of the tensor in each, and what no file has."""
        found: list[tuple[Path, Ranges, Ranges]] = []
        left = [ranges] if _count(ranges) else []
        for part, file in self._parts[name].items():
            rest: list[Ranges] = []
            for each in left:
                common = _common(each, part)
                if _count(common):
                    found.append((file, part, common))
                    rest.extend(_without(each, common))
                else:
                    rest.append(each)
            left = rest
        return found, left


def _heads(file: Path) -> Iterator[tuple[str, Ranges]]:
    """Yield the parts in a file."""
    with safe_open(file, framework="pt") as opened:
        said = json.loads((opened.metadata() or {}).get(_PARTS, "null"))
        for name in opened.keys():  # noqa: SIM118 -- it is not a dict
            shape: list[int] = opened.get_slice(name).get_shape()
            yield name, _ranges([0] * len(shape) if said is None else said[name]["saved_offsets"], shape)


def _copy(file: Path, copies: Iterable[tuple[Box, Ranges, Ranges]]) -> None:
    with safe_open(file, framework="pt") as opened:
        for box, part, ranges in copies:
            source = opened.get_tensor(box.name)  # mapped, so only the used part is read
            _narrow(box.tensor.detach(), box.ranges, ranges).copy_(_narrow(source, part, ranges))


def _joined(boxes: list[Box]) -> Box:
    """Join boxes of one tensor into one, contiguous, in the host's memory."""
    first = boxes[0]
    if len(boxes) == 1:
        return Box(first.name, first.size, first.offsets, first.tensor.detach().cpu().contiguous())
    around = tuple(
        (min(start for start, _ in dim), max(end for _, end in dim))
        for dim in zip(*(box.ranges for box in boxes), strict=True)
    )
    if _count(around) != sum(_count(box.ranges) for box in boxes):
        raise ValueError(f"the {len(boxes)} parts of {first.name} do not make up one rectangle")
    whole = torch.empty([end - start for start, end in around], dtype=first.tensor.dtype)
    for box in boxes:
        _narrow(whole, around, box.ranges).copy_(box.tensor.detach())
    return Box(first.name, first.size, tuple(start for start, _ in around), whole)


def _ranges(offsets: Iterable[int], shape: Iterable[int]) -> Ranges:
    return tuple((offset, offset + length) for offset, length in zip(offsets, shape, strict=True))


def _count(ranges: Ranges) -> int:
    return prod(max(0, end - start) for start, end in ranges)


def _common(one: Ranges, two: Ranges) -> Ranges:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True))


def _without(ranges: Ranges, hole: Ranges) -> Iterator[Ranges]:
    """Yield the rectangles that remain around a hole."""
    for dim, ((start, end), (first, last)) in enumerate(zip(ranges, hole, strict=True)):
        inside, outside = hole[:dim], ranges[dim + 1 :]
        for rest in ((start, first), (last, end)):
            if rest[0] < rest[1]:
                yield (*inside, rest, *outside)


def _narrow(tensor: Tensor, held: Ranges, ranges: Ranges) -> Tensor:
    """Return a rectangle, given a tensor that holds a larger one."""
    for dim, ((start, end), (origin, _)) in enumerate(zip(ranges, held, strict=True)):
        tensor = tensor.narrow(dim, start - origin, end - start)
    return tensor
