"""Segments of torch's CUDA allocator that grow, so that gaps between tensors of many sizes do not fill a GPU."""

import os

import torch
from torch import Tensor

_expanded = False
"""True if `expand` was called."""


def expand() -> None:
    """Let new segments grow, unless the user's variables configure the allocator."""
    global _expanded  # noqa: PLW0603 -- as the allocator, it is the process's own
    _expanded = True
    _set(_grow())


def fixed(nbytes: int, device: torch.device) -> Tensor:
    """Return uint8[nbytes] in a segment that CUDA IPC can share, which it does not with those that grow."""
    grow = _grow()
    if grow:
        _set(False)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        if grow:
            _set(True)


def _given() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _grow() -> bool:
    """True if new segments grow."""
    given = _given()
    return "expandable_segments:True" in given if given else _expanded


def _set(grow: bool) -> None:
    settings = [*filter(None, [_given()]), f"expandable_segments:{grow}"]  # the last one counts
    torch._C._accelerator_setAllocatorSettings(",".join(settings))  # noqa: SLF001 -- torch has no public way
