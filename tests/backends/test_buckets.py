"""The buckets of a broadcast: which part of which tensor is where in them, and copies of parts."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl_hf import fp8
from meshrl_hf.boxes import Box
from meshrl_hf.buckets import planned
from meshrl_hf.collective import Flight, copy, place_in, view
from meshrl_hf.offer import SCALE

LIMIT = 1 << 10


QUANTISED = frozenset({"matrix", "tall", "columns", "none"})


def boxes() -> list[Box]:
    torch.manual_seed(0)
    shapes = {
        "wide": (3, 1000),
        "many": (999, 5),
        "small": (7,),
        "number": (),
        "experts": (2, 3, 700),
        "tall": (3, 700),
    }
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
def test_buckets_have_every_number_once_keep_to_their_size_and_round_rows_as_the_whole_matrix_would(
    dtype: torch.dtype, limit: int
) -> None:
    came, flight, numbers = dict[str, Tensor](), Flight(), Counter[str]()
    plan = planned(boxes(), dtype, limit, QUANTISED)
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
    assert planned([], dtype, limit) == []


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
