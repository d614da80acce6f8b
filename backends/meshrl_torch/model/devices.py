"""Copies from the host's memory to a device without waiting."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device. The host does not wait, because a GPU copies from pinned memory."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
