"""A second proof that weights are in use: the first rows of each tensor, as SGLang has them."""

# SGLang may be in another environment than this one.
# pyright: reportMissingImports=false

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

_ROWS: Final = 2
"""Rows of each tensor that are compared."""


async def read_back(manager: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Read back the first rows of each tensor. RuntimeError if they differ from those sent, or are missing."""
    from sglang.srt.managers.io_struct import GetWeightsByNameReqInput  # noqa: PLC0415 -- in an environment that is set

    for name, tensor in tensors:
        told = await manager.get_weights_by_name(GetWeightsByNameReqInput(name=name, truncate_size=_ROWS))
        if told is None:
            raise RuntimeError(f"SGLang cannot tell `{name}` of this model: remove sampler.sglang.verify_weights")
        if not torch.equal(torch.tensor(told), tensor[:_ROWS].float()):
            raise RuntimeError(f"SGLang has another `{name}` than was sent, and its completions cannot be trusted")
