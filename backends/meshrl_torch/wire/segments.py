"""Segments of torch's CUDA allocator that grow, so that gaps between tensors of many sizes do not fill a GPU."""

import os

import torch
from torch import Tensor


def expand(on: bool = True) -> None:
    """Let new segments grow, unless `on` is False, or the user's variables configure the allocator."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    grow = on and (not given or "expandable_segments:True" in given)
    settings = [*([given] if given else []), f"expandable_segments:{grow}"]  # the last one counts
    torch._C._accelerator_setAllocatorSettings(",".join(settings))  # noqa: SLF001 -- torch has no public way


def fixed(nbytes: int, device: torch.device) -> Tensor:
    """Return uint8[nbytes] in a segment that CUDA IPC can share, which it does not with those that grow."""
    expand(on=False)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        expand()
