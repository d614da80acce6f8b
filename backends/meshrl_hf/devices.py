"""From the host's memory to a device's, without a wait."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, on the device. The host does not wait for the copy: a GPU takes it from pinned memory."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
