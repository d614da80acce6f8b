"""Tensors that stay in float32 in a model of a narrower dtype, as transformers loads it, such as biases of routers.

All backends keep, send and save them so. Otherwise weights of one could not be loaded into another.
"""

import re
from typing import cast

import torch
from torch import nn


def is_wide(network: nn.Module, name: str) -> bool:
    """True if transformers keeps the tensor of this name in float32, whatever dtype the model has."""
    patterns = cast("set[str]", getattr(network, "_keep_in_fp32_modules_strict", None) or set())
    return any(re.search(each.replace("*", ".*"), name) for each in patterns)


def dtype_in(network: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a model of `dtype`."""
    return torch.float32 if is_wide(network, name) else dtype
