"""The buckets of a broadcast: which part of which tensor is where in them, and copies of parts."""

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl_hf.boxes import Box
from meshrl_hf.buckets import planned
from meshrl_hf.collective import Flight, copy, place_in, view

LIMIT = 1 << 10


def boxes() -> list[Box]:
    torch.manual_seed(0)
    shapes = {"wide": (3, 1000), "many": (999, 5), "small": (7,), "number": (), "experts": (2, 3, 700)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return [
        *(Box(name, tuple(each.shape), (0,) * each.dim(), each) for name, each in tensors.items()),
        Box("part", (8, 2, 4), (4, 0, 2), torch.randn(4, 2, 2)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_have_every_number_once_and_keep_to_their_size(dtype: torch.dtype) -> None:
    whole = {box.name: torch.full(box.size, torch.nan, dtype=dtype) for box in boxes()}
    plan = planned(boxes(), dtype, LIMIT)
    flight = Flight()
    flight.begin(max(bucket.layout.nbytes for bucket in plan), torch.device("cpu"))
    for bucket in plan:
        layout = bucket.layout
        assert layout.nbytes <= LIMIT
        buffer = flight.memory(layout.nbytes)
        bucket.write(buffer)
        assert layout.nbytes == layout.parts[-1].start + prod(layout.parts[-1].shape) * dtype.itemsize
        for part in layout.parts:
            assert part.start % 64 == 0
            came = view(buffer, part)
            place = place_in(whole[part.name], part)
            assert place.isnan().all()
            place.copy_(came)
        flight.drop()
    for box in boxes():
        there = whole[box.name][tuple(map(slice, box.offsets, np.add(box.offsets, box.tensor.shape).tolist()))]
        assert torch.equal(there, box.tensor.to(dtype))
    assert planned([], dtype, LIMIT) == []
    assert sum(int(each.isnan().sum()) for each in whole.values()) == 64 - 16  # what others have of `part`


class Copies(TorchDispatchMode):
    """Notes the bytes of each copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), keys: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].nbytes)
        return op(*args, **(keys or {}))


def test_copies_that_need_others_between_devices_are_small() -> None:
    """A tensor on torch's device "meta" lies on another device, and its copies cost nothing."""
    for shape in ((), (3,), (5000, 300), (3, 600, 700), (2, 900_000), (1 << 20, 3)):
        tensor = torch.zeros(shape)
        with Copies() as copies:
            copy(torch.empty(shape, dtype=torch.bfloat16, device="meta"), tensor)
        assert sum(copies.sizes) == tensor.nbytes
        assert max(copies.sizes) <= 1 << 20, shape
