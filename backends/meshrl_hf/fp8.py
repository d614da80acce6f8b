"""Matrices in FP8: numbers of 8 bits, and a scale for each row. Engines' processes make them too. They have no meshrl.

A row's scale is its largest absolute value divided by 448, the largest number of the format.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

from meshrl_hf.offer import FP8

_LARGEST: Final = torch.finfo(getattr(torch, FP8)).max
_TINY: Final = torch.finfo(torch.float32).tiny
"""The smallest scale, as of a row of zeros."""
_BLOCK: Final = 1 << 18
"""Number of elements that are converted at once, in float32."""


def matrices(network: Any) -> frozenset[str]:
    """Return the names of the matrices of a transformers model that FP8 is for: of linear layers, without the head."""
    head = network.get_output_embeddings()
    linear = (name for name, each in network.named_modules() if isinstance(each, nn.Linear) and each is not head)
    return frozenset(f"{name}.weight" for name in linear)


def write(rows: Tensor, dtype: torch.dtype, scales: Tensor, place: Tensor) -> None:
    """Write rows of a matrix, rounded to `dtype` before, in FP8, and their scales, float32[rows, 1]."""
    size = max(1, _BLOCK // max(1, rows.shape[1]))
    for source, scale, numbers in zip(rows.split(size), scales.split(size), place.split(size), strict=True):
        block = source.to(dtype).float()
        scale.copy_((block.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(_TINY))
        numbers.copy_((block / scale).clamp(-_LARGEST, _LARGEST))


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and its scales, float32[rows, 1]."""
    scales = torch.empty(len(matrix), 1, device=matrix.device)
    made = torch.empty(matrix.shape, dtype=getattr(torch, FP8), device=matrix.device)
    write(matrix, matrix.dtype, scales, made)
    return made, scales
