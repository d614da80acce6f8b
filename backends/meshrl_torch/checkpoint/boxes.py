"""Rectangular parts of tensors, and safetensors files of them. Any layout of ranks reads what another one wrote.

The format is that of torch's `HuggingFaceStorageWriter`: a file for each rank, which names its part of each tensor.
Whole tensors, as in a Hugging Face folder, are one part. Nothing is pickled. Written files have `Sums`.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeAlias

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from xxhash import xxh3_64_digest

from meshrl.errors import Damaged, ModelError
from meshrl.roles import SUMMED_BYTES, Sums

_METADATA: Final = {"DCP_VERSION": "1.0", "format": "pt"}
_PARTS: Final = "DCP_SHARDING_INFO"
"""The metadata key that torch's reader looks for."""
_LONGEST_HEAD: Final = 100_000_000
"""Bytes. The limit of safetensors."""
_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_REMEDY: Final = "Restore it from a copy, or use an earlier checkpoint"
_STAGED: Final = 1 << 24
"""The most bytes of a tensor that are read at once if they cannot go straight into another."""

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


class _Part(NamedTuple):
    """A part of a tensor in a file."""

    file: Path
    ranges: Ranges
    form: str
    """The dtype's name in the file."""
    start: int
    """Offset in the file, in bytes."""
    sums: bytes | None
    """The sum of each block, if the file has `Sums`."""


def write_boxes(file: Path, boxes: Iterable[Box]) -> None:
    """Write a safetensors file and its sums, and wait until they are on the disk. Without boxes, no file is written.

    Boxes of one name must form one rectangle. Raises ModelError if a file cannot be written.
    """
    together: dict[str, list[Box]] = {}
    for box in boxes:
        together.setdefault(box.name, []).append(box)
    joined = sorted(map(_joined, together.values()), key=lambda box: (-box.tensor.itemsize, box.name))  # for alignment
    if not joined:
        return
    parts = {box.name: {"saved_offsets": box.offsets} for box in joined}
    entries: dict[str, object] = {"__metadata__": {**_METADATA, _PARTS: json.dumps(parts)}}
    end = 0
    for box in joined:
        start, end = end, end + box.tensor.nbytes
        form = {"dtype": _NAMES[box.tensor.dtype], "shape": box.tensor.shape, "data_offsets": (start, end)}
        entries[box.name] = form
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    try:
        with _synced(file) as opened:
            opened.write(head)
            sums = {box.name: _write(opened, _bytes(box.tensor)) for box in joined}
        with _synced(Sums.beside(file)) as opened:
            opened.write(msgspec.json.encode(Sums(len(head) + end, xxh3_64_digest(head), sums)))
    except OSError as error:
        raise ModelError(f"{file.parent} cannot be written: {type(error).__name__}: {error}") from error


class Boxes:
    """The parts of tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Find the parts. SafetensorError, OSError, KeyError or ValueError if a file is not valid.

        Damaged if the head of a file, which names its parts, differs from its sum. `files`: of the folder, if not all.
        """
        self._folder = folder
        self._parts: dict[str, dict[Ranges, _Part]] = {}
        self._elements: Counter[str] = Counter()
        self.files: Final = sorted(folder.glob("*.safetensors")) if files is None else list(files)
        for file in self.files:
            for name, part in _parts(file):
                self._parts.setdefault(name, {}).setdefault(part.ranges, part)
                self._elements[name] += _count(part.ranges)
        self.sizes: Final[Mapping[str, tuple[int, ...]]] = {
            name: tuple(max(end for _, end in dim) for dim in zip(*parts, strict=True))
            for name, parts in self._parts.items()
        }
        """The size of each whole tensor, as far as its parts show."""
        first = {name: next(iter(parts.values())) for name, parts in self._parts.items()}
        self.forms: Final[Mapping[str, str]] = {name: part.form for name, part in first.items()}
        """The name of each tensor's dtype in the files."""
        self.where: Final[Mapping[str, Path]] = {name: part.file for name, part in first.items()}
        """The first file with a part of each tensor."""

    def is_whole(self, name: str) -> bool:
        """True if the files contain each element of a tensor of `sizes` once."""
        size = self.sizes[name]
        return self._elements[name] == prod(size) and not self._found(name, _ranges([0] * len(size), size))[1]

    def read(self, boxes: Iterable[Box]) -> None:
        """Fill each box's tensor, in its dtype, from the files. Nothing else is read from them.

        ModelError, before any copy, if files lack part of a box or torch lacks its dtype. Also if a file cannot be read
        to its end, and Damaged if a block differs from its sum: then some boxes are filled.
        """
        plan: dict[Path, list[tuple[_Part, Box, Ranges]]] = {}
        for box in boxes:
            self._check(box)
            for part, ranges in self._found(box.name, box.ranges)[0]:
                if part.form not in _DTYPES:
                    raise ModelError(f"{part.file} has `{box.name}` in the dtype {part.form}, which torch lacks")
                plan.setdefault(part.file, []).append((part, box, ranges))
        try:
            with torch.no_grad():
                for file, copies in plan.items():
                    with file.open("rb", buffering=0) as opened:
                        _advise(opened.fileno(), "SEQUENTIAL")  # the disk reads on while a block is summed
                        for part, box, ranges in sorted(copies, key=lambda copy: copy[0].start):
                            _copy(opened.fileno(), part, box, ranges)
        except OSError as error:
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

    def _found(self, name: str, ranges: Ranges) -> tuple[list[tuple[_Part, Ranges]], list[Ranges]]:
        """Find a rectangle: what is in each part, and what no file has."""
        found: list[tuple[_Part, Ranges]] = []
        left = [ranges] if _count(ranges) else []
        for part in self._parts[name].values():
            rest: list[Ranges] = []
            for each in left:
                common = _common(each, part.ranges)
                if _count(common):
                    found.append((part, common))
                    rest.extend(_without(each, common))
                else:
                    rest.append(each)
            left = rest
        return found, left


def _parts(file: Path) -> Iterator[tuple[str, _Part]]:
    """Yield the parts in a file by name."""
    sums = Sums.of(file)
    with file.open("rb") as opened:
        length = opened.read(8)
        text = opened.read(min(int.from_bytes(length, "little"), _LONGEST_HEAD))
    if sums and xxh3_64_digest(length + text) != sums.head:
        raise Damaged(f"{file} is not as it was written: its head differs. {_REMEDY}")
    with safe_open(file, framework="pt"):  # checks that the head is valid, and fits the file's size
        entries = json.loads(text)
    offsets = json.loads((entries.pop("__metadata__", None) or {}).get(_PARTS, "null"))
    for name, entry in entries.items():
        start = [0] * len(entry["shape"]) if offsets is None else offsets[name]["saved_offsets"]
        first = len(length) + len(text) + entry["data_offsets"][0]
        own = sums.tensors[name] if sums else None
        yield name, _Part(file, _ranges(start, entry["shape"]), entry["dtype"], first, own)


def _copy(file: int, part: _Part, box: Box, ranges: Ranges) -> None:
    """Copy a rectangle from a part to a box: straight into its memory if possible."""
    dtype = _DTYPES[part.form]
    whole = torch.empty([end - start for start, end in part.ranges], dtype=dtype, device="meta")
    source = _narrow(whole, part.ranges, ranges)
    target = _narrow(box.tensor.detach(), box.ranges, ranges)
    read = partial(_read, file, part, box.name, whole.nbytes)
    is_plain = source.is_contiguous() and target.is_contiguous()
    if is_plain and target.dtype == dtype and target.device.type == "cpu":
        read(int(source.storage_offset()) * dtype.itemsize, _bytes(target))
    else:
        _stage(source, target, read)


def _stage(source: Tensor, target: Tensor, read: Callable[[int, memoryview], None]) -> None:
    """Copy piece by piece. `source`: a view without values of what `read` reads."""
    span = 1 + sum((length - 1) * stride for length, stride in zip(source.shape, source.stride(), strict=True))
    if not source.dim() or span * source.itemsize <= _STAGED:
        content = torch.empty(span, dtype=source.dtype)
        read(int(source.storage_offset()) * source.itemsize, _bytes(content))
        target.copy_(content.as_strided(source.shape, source.stride()))
    elif len(source) == 1:
        _stage(source[0], target[0], read)
    else:
        rows = max(1, _STAGED // (source.stride(0) * source.itemsize))
        for into, piece in zip(target.split(rows), source.split(rows), strict=True):
            _stage(piece, into, read)


def _read(file: int, part: _Part, name: str, nbytes: int, start: int, content: memoryview) -> None:
    """Read bytes of a part from `start` on, and verify each block that has some of them."""
    end = start + len(content)
    if part.sums is None:
        _read_at(file, part.start + start, content)
        return
    for number in range(start // SUMMED_BYTES, -(-end // SUMMED_BYTES)):
        first, last = number * SUMMED_BYTES, min((number + 1) * SUMMED_BYTES, nbytes)
        inside = start <= first and last <= end
        block = content[first - start : last - start] if inside else memoryview(bytearray(last - first))
        _read_at(file, part.start + first, block)
        if xxh3_64_digest(block) != part.sums[8 * number : 8 * number + 8]:
            raise Damaged(
                f"{part.file} is not as it was written: `{name}` differs in its bytes {first} to {last - 1}. {_REMEDY}"
            )
        if not inside:
            low, high = max(start, first), min(end, last)
            content[low - start : high - start] = block[low - first : high - first]


def _read_at(file: int, offset: int, content: memoryview) -> None:
    """Read bytes from an offset on."""
    done = 0
    while done < len(content):
        count = os.preadv(file, [content[done:]], offset + done)
        if not count:
            raise OSError(f"a file ends at byte {offset + done}, too early")
        done += count


def _write(file: BinaryIO, content: memoryview) -> bytes:
    """Write bytes, and return the sums of their blocks, each computed while the block is in the processor's cache."""
    sums = bytearray()
    for start in range(0, len(content), SUMMED_BYTES):
        block = content[start : start + SUMMED_BYTES]
        file.write(block)
        sums += xxh3_64_digest(block)
    _advise(file.fileno(), "DONTNEED", file.tell() - len(content), len(content))  # to the disk from now on
    return bytes(sums)


def _advise(file: int, advice: str, start: int = 0, size: int = 0) -> None:
    """Tell the kernel how a range of a file will be used, on systems that can be told."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # some file systems cannot
            os.posix_fadvise(file, start, size, getattr(os, f"POSIX_FADV_{advice}"))


@contextmanager
def _synced(file: Path) -> Generator[BinaryIO]:
    """Open a file to write it, and wait at the end until it is on the disk."""
    with file.open("wb") as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in the host's memory. Writing to them changes it."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


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
