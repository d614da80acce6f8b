"""Parts of tensors: in the buckets of a broadcast, in files in any tiling, and their fingerprints."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshrl.errors import Damaged, ModelError
from meshrl.roles import Sums
from meshrl_torch.checkpoint.boxes import Box, Boxes, Ranges, write_boxes
from meshrl_torch.weights.buckets import make_buckets
from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_bytes import fingerprint, place_in, view
from meshrl_torch.wire.collective import InFlightBuckets
from meshrl_torch.wire.manifest import SCALE

LIMIT = 1 << 10
QUANTISED = frozenset({"matrix", "tall", "columns", "none"})


def boxes() -> list[Box]:
    torch.manual_seed(0)
    shapes = {
        "wide": (3, 1000), "many": (999, 5), "small": (7,), "number": (), "experts": (2, 3, 700), "tall": (3, 700),
    }  # fmt: skip
    matrix = torch.randn(70, 30)
    return [
        Box("matrix", (70, 30), (0, 0), matrix[:40]),
        *(Box(name, shape, (0,) * len(shape), torch.randn(shape)) for name, shape in shapes.items()),
        Box("matrix", (70, 30), (40, 0), matrix[40:]),
        Box("columns", (4, 30), (0, 10), torch.randn(4, 10)),
        Box("none", (4, 30), (4, 0), torch.randn(0, 30)),
        Box("part", (8, 2, 4), (4, 0, 2), torch.randn(4, 2, 2)),
    ]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, LIMIT), (torch.bfloat16, LIMIT), (torch.bfloat16, 1 << 16)]
)
def test_buckets_have_every_number_once_keep_to_their_size_and_round_whole_rows(dtype: torch.dtype, limit: int) -> None:
    came, flight, numbers = dict[str, Tensor](), InFlightBuckets(), Counter[str]()
    plan = make_buckets(boxes(), dtype, limit, QUANTISED)
    flight.begin(max(bucket.layout.nbytes for bucket in plan), torch.device("cpu"))
    for bucket in plan:
        assert bucket.layout.nbytes <= limit
        memory = flight.memory(bucket.layout.nbytes)
        bucket.write(memory)
        for part in bucket.layout.parts:
            assert part.start % 64 == 0
            content = view(memory, part)
            whole = came.setdefault(part.name, torch.zeros(part.size, dtype=content.dtype))
            place_in(whole, part).copy_(content)
            numbers[part.name] += content.numel()
        flight.drop()
    expected = Counter[str]()
    for box in boxes():
        name, tensor = box.name, box.tensor.to(dtype)
        expected[name] += tensor.numel()
        there = tuple(map(slice, box.offsets, np.add(box.offsets, box.tensor.shape).tolist()))
        if name in {"matrix", "tall"}:
            rounded, scales = fp8.quantized(tensor)
            expected[name + SCALE] += len(tensor)
            assert torch.equal(came[name][there].view(torch.uint8), rounded.view(torch.uint8))
            assert torch.equal(came[name + SCALE][there[0]], scales)
        elif tensor.numel():
            assert torch.equal(came[name][there], tensor)  # a rank with some columns does not know the rows' scales
    assert numbers == +expected
    assert make_buckets([], dtype, limit) == []


SIGN = -(1 << 15)


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_is_of_the_bytes_wherever_they_lie(dtype: torch.dtype) -> None:
    for shape in [(), (7,), (300, 2000), (999, 5), (3, 40_001), (0, 4), (4 * 1021,), (4 * 1020 + 1,)]:
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


def test_damage_changes_the_fingerprint() -> None:
    for name, damage in DAMAGES.items():
        tensor = whole((1200, 2000)).bfloat16()
        known = fingerprint(tensor)
        damage(tensor.view(torch.int16))
        assert fingerprint(tensor) != known, name


def test_for_a_fingerprint_the_host_reads_nothing_of_a_tensor_elsewhere() -> None:
    """A tensor on torch's device "meta" refuses each copy to the host, and has no number to read."""
    made = fingerprint(torch.empty(8000, 5000, dtype=torch.bfloat16, device="meta"))
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.int64, ())


def tiled(draw: st.DrawFn, ranges: Ranges, depth: int) -> list[Ranges]:
    dim = draw(st.integers(0, len(ranges) - 1))
    start, end = ranges[dim]
    if not depth or end - start < 2:
        return [ranges]
    cut = draw(st.integers(start + 1, end - 1))
    return [
        tile
        for side in pairwise((start, cut, end))
        for tile in tiled(draw, (*ranges[:dim], side, *ranges[dim + 1 :]), draw(st.integers(0, depth - 1)))
    ]


def boxed(name: str, whole: Tensor, tile: Ranges) -> Box:
    part = whole
    for dim, (start, end) in enumerate(tile):
        part = part.narrow(dim, start, end - start)
    return Box(name, tuple(whole.shape), tuple(start for start, _ in tile), part)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[list[Box]], list[Box]]:
    tensors: dict[str, Tensor] = {}
    files: list[list[Box]] = [[] for _ in range(9)]
    wanted: list[Box] = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        name, whole = f"tensor{number}", torch.arange(1.0, prod(size) + 1).reshape(size)
        tensors[name], everything = whole, tuple((0, length) for length in size)
        order = draw(st.permutations(files))
        for file, tile in zip(order, tiled(draw, everything, 3), strict=False):
            file.extend(boxed(name, whole, each) for each in draw(st.permutations(tiled(draw, tile, 2))))
        target = torch.full(size, torch.nan)
        wanted.extend(boxed(name, target, tile) for tile in tiled(draw, everything, 3))
    return tensors, files, wanted


@settings(max_examples=50)
@given(st.data(), tilings())
def test_what_one_tiling_writes_another_reads_and_verifies_block_by_block(
    data: st.DataObject, drawn: tuple[dict[str, Tensor], list[list[Box]], list[Box]]
) -> None:
    tensors, files, wanted = drawn
    small = patch.multiple("meshrl_torch.checkpoint.boxes", SUMMED_BYTES=16, _STAGED=12)
    with tempfile.TemporaryDirectory() as name, patch("os.fsync"), small:
        folder = Path(name)
        for number, boxes in enumerate(files):
            write_boxes(folder / f"{number}.safetensors", boxes)
        assert len(list(folder.iterdir())) == 2 * sum(map(bool, files))
        found = Boxes(folder)
        assert found.sizes == {name: tuple(whole.shape) for name, whole in tensors.items()}
        assert all(map(found.is_whole, tensors))
        found.read(wanted)
        for box in wanted:
            assert torch.equal(box.tensor, boxed(box.name, tensors[box.name], box.ranges).tensor)
        file = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
        whole = bytearray(file.read_bytes())
        head = 8 + int.from_bytes(whole[:8], "little")
        place = data.draw(st.integers(head, len(whole) - 1))
        whole[place] ^= 1
        file.write_bytes(whole)
        read, refused = 0, 0
        for box in wanted:
            try:
                Boxes(folder).read([box])
            except Damaged:
                refused += 1
            else:
                read += 1
                assert torch.equal(box.tensor, boxed(box.name, tensors[box.name], box.ranges).tensor)
        assert refused, "a box has the changed number"
        assert read + refused == len(wanted)


WHOLE = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def halves(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        write_boxes(file, [Box("model/w", (4, 3), (2 * number, 0), WHOLE[2 * number : 2 * number + 2])])
    return files


def test_whole_tensors_are_read_in_parts_and_cast(tmp_path: Path) -> None:
    save_file({"w": WHOLE.bfloat16(), "none": torch.zeros(0, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"other": WHOLE, "w": WHOLE.bfloat16()}, tmp_path / "model-00002-of-00002.safetensors")
    target, found = torch.zeros(2, 1), Boxes(tmp_path)
    assert [found.is_whole(name) for name in ("w", "none", "other")] == [False, True, True]
    found.read([Box("w", (4, 3), (1, 2), target), Box("none", (0, 3), (0, 0), torch.zeros(0, 3))])
    assert torch.equal(target, WHOLE[1:3, 2:])
    one = target.reshape(1, 2, 1)
    (tmp_path / "one").mkdir()
    save_file({"w": WHOLE[None]}, tmp_path / "one" / "model.safetensors")
    Boxes(tmp_path / "one").read([Box("w", (1, 4, 3), (0, 1, 1), one)])
    assert torch.equal(one[0], WHOLE[1:3, 1:2])


def test_only_tensors_that_are_read_need_a_dtype_that_torch_has(tmp_path: Path) -> None:
    half, w = ({"dtype": form, "shape": [4], "data_offsets": at} for form, at in (("F4", (0, 2)), ("F32", (2, 18))))
    text = json.dumps({"__metadata__": None, "half": half, "w": w}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(18))
    found, target = Boxes(tmp_path), torch.ones(4)
    found.read([Box("w", (4,), (0,), target)])
    assert not target.any()
    with pytest.raises(ModelError, match="has `half` in the dtype F4, which torch lacks"):
        found.read([Box("half", (4,), (0,), target)])


def test_what_is_missing_is_told_and_nothing_is_read(tmp_path: Path, halves: list[Path]) -> None:
    halves[0].unlink()
    found = Boxes(tmp_path)
    assert not found.is_whole("model/w")
    there, half = (Box("model/w", (4, 3), (start, 0), torch.zeros(2, 3)) for start in (2, 1))
    for wrong, words in (
        (half, r"the files of .* lack the part \[1:2, 0:3\] of `model/w`, \[4, 3\]"),
        (replace(half, size=(8, 3)), r"have `model/w` as \[4, 3\], not \[8, 3\]"),
        (replace(half, name="model/v"), "lack the tensor `model/v`"),
    ):
        with pytest.raises(ModelError, match=words):
            found.read([there, wrong])
    assert not there.tensor.any()
    found.read([there])
    assert there.tensor.all()


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path, halves: list[Path]) -> None:
    found = Boxes(tmp_path)
    halves[0].write_bytes(halves[0].read_bytes()[:50])
    with pytest.raises(Damaged, match=f"{halves[0]} is not as it was written: its head differs"):
        Boxes(tmp_path)
    Sums.beside(halves[0]).unlink()
    with pytest.raises(SafetensorError):
        Boxes(tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path} cannot be read: OSError: a file ends at byte"):
        found.read([Box("model/w", (4, 3), (0, 0), torch.zeros(4, 3))])
    box = Box("w", (2,), (0,), torch.zeros(2))
    with pytest.raises(ModelError, match=rf"{tmp_path / 'absent'} cannot be written: "):
        write_boxes(tmp_path / "absent" / "file.safetensors", [box])
    with pytest.raises(ValueError, match="the 2 parts of w do not make up one rectangle"):
        write_boxes(tmp_path / "file.safetensors", [box, Box("w", (5,), (3,), torch.zeros(2))])
