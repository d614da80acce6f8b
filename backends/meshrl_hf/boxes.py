"""Rectangular parts of tensors, and safetensors files of them: what one layout of ranks writes, any other reads.

The format is that of torch's `HuggingFaceStorageWriter`: a file for each rank, which says what part of each tensor it
has. Whole tensors, as in a Hugging Face folder, are one part. Nothing is pickled.
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
"""torch's names, which its reader looks for."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangle: for each dim the first index, and that after the last."""


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor."""

    name: str
    size: tuple[int, ...]
    """The whole tensor's."""
    offsets: tuple[int, ...]
    """Where the rectangle begins in it."""
    tensor: Tensor
    """The rectangle. Writing into it changes what it was made from."""

    @property
    def ranges(self) -> Ranges:
        """What of the whole tensor it is."""
        return _ranges(self.offsets, self.tensor.shape)


def write_boxes(file: Path, boxes: Iterable[Box]) -> None:
    """Write a safetensors file until it lies on the disk; no file where there are no boxes.

    Boxes of one name must make up one rectangle together. ModelError where the file cannot be written.
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
    """The parts of tensors that the safetensors files of a folder hold."""

    def __init__(self, folder: Path) -> None:
        """Reads where each part lies. SafetensorError, OSError, KeyError or ValueError where a file is damaged."""
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
        """Of each whole tensor, as far as its parts tell."""

    def overlaps(self, name: str) -> bool:
        """Whether files have some of a tensor of `sizes` more than once."""
        return self._elements[name] > prod(self.sizes[name]) - sum(map(_count, self.missing(name)))

    def missing(self, name: str) -> list[Ranges]:
        """What no file has of a tensor of `sizes`, as rectangles."""
        return self._found(name, tuple((0, length) for length in self.sizes[name]))[1]

    def read(self, boxes: Iterable[Box]) -> None:
        """Copy into each box's tensor, in its dtype, what the files have of it; nothing else of them is read.

        ModelError, and nothing copied, where they lack part of a box; also where a file cannot be read to its end:
        then some boxes are filled.
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
        """What of a rectangle lies in which file, which part of a tensor it has there, and what lies in none."""
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
    """The parts that a file has."""
    with safe_open(file, framework="pt") as opened:
        said = json.loads((opened.metadata() or {}).get(_PARTS, "null"))
        for name in opened.keys():  # noqa: SIM118 -- it is no dict
            shape: list[int] = opened.get_slice(name).get_shape()
            yield name, _ranges([0] * len(shape) if said is None else said[name]["saved_offsets"], shape)


def _copy(file: Path, copies: Iterable[tuple[Box, Ranges, Ranges]]) -> None:
    with safe_open(file, framework="pt") as opened:
        for box, part, ranges in copies:
            source = opened.get_tensor(box.name)  # mapped: what is not used of it is not read
            _narrow(box.tensor.detach(), box.ranges, ranges).copy_(_narrow(source, part, ranges))


def _joined(boxes: list[Box]) -> Box:
    """One box of several of the same tensor, in the host's memory, contiguous."""
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
    """What is left of a rectangle around a hole in it."""
    for dim, ((start, end), (first, last)) in enumerate(zip(ranges, hole, strict=True)):
        inside, outside = hole[:dim], ranges[dim + 1 :]
        for rest in ((start, first), (last, end)):
            if rest[0] < rest[1]:
                yield (*inside, rest, *outside)


def _narrow(tensor: Tensor, held: Ranges, ranges: Ranges) -> Tensor:
    """A part of a tensor that holds a rectangle of a larger one."""
    for dim, ((start, end), (origin, _)) in enumerate(zip(ranges, held, strict=True)):
        tensor = tensor.narrow(dim, start - origin, end - start)
    return tensor
