"""Tensors that arrived in shared memory, as a policy has them."""

from collections.abc import Iterator
from math import prod

import torch

from meshrl_inference.mapped import mapped

Places = list[tuple[str, list[tuple[str, str, list[int], int]]]]
"""Files in shared memory, with the name, dtype, shape and offset in bytes of each tensor."""


def tensors(places: Places) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with its name, in the memory that it arrived in. Do not write to it."""
    for path, parts in places:
        whole = torch.frombuffer(mapped(path), dtype=torch.uint8)
        for name, dtype, shape, start in parts:
            kind: torch.dtype = getattr(torch, dtype)
            yield name, whole[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape)
