"""Files of parts of tensors: what is written in one tiling is read in any other, to the bit."""

import tempfile
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshrl.errors import ModelError
from meshrl_hf.boxes import Box, Boxes, Ranges, write_boxes


def tiled(draw: st.DrawFn, ranges: Ranges, depth: int) -> list[Ranges]:
    """A rectangle cut in two, and each part again."""
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
    """Tensors; the boxes of each file, some cut further; boxes of NaN to read into."""
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


@given(tilings())
def test_what_is_written_in_one_tiling_is_read_in_any_other(
    drawn: tuple[dict[str, Tensor], list[list[Box]], list[Box]],
) -> None:
    tensors, files, wanted = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, boxes in enumerate(files):
            write_boxes(folder / f"{number}.safetensors", boxes)
        assert len(list(folder.iterdir())) == sum(map(bool, files))
        found = Boxes(folder)
        assert found.sizes == {name: tuple(whole.shape) for name, whole in tensors.items()}
        assert not any(found.missing(name) or found.overlaps(name) for name in tensors)
        found.read(wanted)
        for box in wanted:
            assert torch.equal(box.tensor, boxed(box.name, tensors[box.name], box.ranges).tensor)


def write_halves(folder: Path) -> None:
    """A tensor [4, 3] in two files."""
    whole = torch.arange(12.0).reshape(4, 3)
    for number in range(2):
        part = Box("model/w", (4, 3), (2 * number, 0), whole[2 * number : 2 * number + 2])
        write_boxes(folder / f"shard-0000{number + 1}-model-00001-of-00001.safetensors", [part])


def test_whole_tensors_are_read_in_parts_and_cast(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    save_file({"w": whole.bfloat16(), "none": torch.zeros(0, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"other": whole, "w": whole.bfloat16()}, tmp_path / "model-00002-of-00002.safetensors")
    target, found = torch.zeros(2, 1), Boxes(tmp_path)
    assert [found.overlaps(name) for name in ("w", "none", "other")] == [True, False, False]
    found.read([Box("w", (4, 3), (1, 2), target), Box("none", (0, 3), (0, 0), torch.zeros(0, 3))])
    assert torch.equal(target, whole[1:3, 2:])


def test_what_is_missing_is_told_and_nothing_is_read(tmp_path: Path) -> None:
    write_halves(tmp_path)
    next(iter(sorted(tmp_path.iterdir()))).unlink()
    found = Boxes(tmp_path)
    assert found.missing("model/w") == [((0, 2), (0, 3))]
    there, half = (Box("model/w", (4, 3), (start, 0), torch.zeros(2, 3)) for start in (2, 1))
    with pytest.raises(ModelError, match=r"the files of .* lack the part \[1:2, 0:3\] of `model/w`, \[4, 3\]"):
        found.read([there, half])
    with pytest.raises(ModelError, match=r"have `model/w` as \[4, 3\], not \[8, 3\]"):
        found.read([there, Box("model/w", (8, 3), (0, 0), torch.zeros(2, 3))])
    with pytest.raises(ModelError, match="lack the tensor `model/v`"):
        found.read([there, Box("model/v", (4, 3), (0, 0), torch.zeros(2, 3))])
    assert not there.tensor.any()
    found.read([there])
    assert there.tensor.all()


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    write_halves(tmp_path)
    found, file = Boxes(tmp_path), min(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(SafetensorError):
        Boxes(tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path} cannot be read: SafetensorError"):
        found.read([Box("model/w", (4, 3), (0, 0), torch.zeros(4, 3))])
    box = Box("w", (2,), (0,), torch.zeros(2))
    with pytest.raises(ModelError, match=rf"{tmp_path / 'absent'} cannot be written: "):
        write_boxes(tmp_path / "absent" / "file.safetensors", [box])
    with pytest.raises(ValueError, match="the 2 parts of w do not make up one rectangle"):
        write_boxes(tmp_path / "file.safetensors", [box, Box("w", (5,), (3,), torch.zeros(2))])
