"""How parts of tensors are laid out in the buckets of a broadcast, and what of a fingerprint is left."""

from math import prod

import numpy as np
import pytest
import torch

from meshrl_hf.boxes import Box
from meshrl_hf.broadcast import Staging, copied, fill, planned, view

LIMIT = 1 << 10


def boxes() -> list[Box]:
    torch.manual_seed(0)
    shapes = {"wide": (3, 1000), "many": (999, 5), "small": (7,), "number": ()}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return [
        *(Box(name, tuple(each.shape), (0,) * each.dim(), each) for name, each in tensors.items()),
        Box("part", (8, 2, 4), (4, 0, 2), torch.randn(4, 2, 2)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_have_every_number_once_and_keep_to_their_size(dtype: torch.dtype) -> None:
    whole = {box.name: torch.full(box.size, torch.nan, dtype=dtype) for box in boxes()}
    plan = planned(boxes(), dtype, LIMIT)
    buffer = Staging().get([layout for layout, _ in plan], torch.device("cpu"))[0]
    for layout, tensors in plan:
        assert layout.end <= LIMIT or len(layout.parts) == 1  # a row that is longer
        fill(buffer[: layout.nbytes], layout, tensors, dtype)
        told = buffer[layout.end : layout.nbytes].numpy().view(np.uint64).tolist()
        for part, known in zip(layout.parts, told, strict=True):
            assert part.start % 64 == 0
            assert part.start + prod(part.shape) * dtype.itemsize <= layout.end
            came = view(buffer, part, dtype)
            place = whole[part.name][tuple(map(slice, part.offsets, np.add(part.offsets, part.shape).tolist()))]
            assert place.isnan().all()
            assert copied(place, came) == known
            assert torch.equal(place, came)
    for box in boxes():
        there = whole[box.name][tuple(map(slice, box.offsets, np.add(box.offsets, box.tensor.shape).tolist()))]
        assert torch.equal(there, box.tensor.to(dtype))
    assert sum(int(each.isnan().sum()) for each in whole.values()) == 64 - 16  # what others have of `part`


def test_a_flipped_bit_changes_a_fingerprint_and_strides_do_not() -> None:
    tensor = torch.randn(300, 2000)
    place = torch.empty_like(tensor, dtype=torch.bfloat16)
    before = copied(place, tensor)
    assert copied(torch.empty(2000, 300, dtype=torch.bfloat16).T, tensor) == before
    assert copied(torch.empty_like(place), place) == before
    place.view(torch.int16)[57, 3] ^= 1
    assert copied(torch.empty_like(place), place) != before
    assert planned([], torch.float32, LIMIT) == []
