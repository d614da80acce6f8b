"""Tensors that arrived in shared memory, as a policy has them."""

from collections.abc import Iterator
from math import prod

import torch

from meshrl_inference.mapped import mapped

Places = list[tuple[str, list[tuple[str, str, list[int], int]]]]
"""Files in shared memory, and what lies where: name, dtype, shape, start in bytes."""


def tensors(places: Places) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by its name, in the memory that it came in: it is not to be written."""
    for path, parts in places:
        whole = torch.frombuffer(mapped(path), dtype=torch.uint8)
        for name, dtype, shape, start in parts:
            kind: torch.dtype = getattr(torch, dtype)
            yield name, whole[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape)
