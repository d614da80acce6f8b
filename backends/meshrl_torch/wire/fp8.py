"""Matrices in FP8: numbers of 8 bits, and a scale for each row.

A row's scale is its largest absolute value divided by 448, the largest number of the format.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

from meshrl_torch.wire.manifest import FP8

_LARGEST: Final = torch.finfo(getattr(torch, FP8)).max
_INVERSE: Final = 1 / _LARGEST
"""A factor, because GPUs divide by a number by multiplying, and their bits would differ from those of CPUs."""
_TINY: Final = torch.finfo(torch.float32).tiny
"""The smallest scale, as of a row of zeros."""
_BLOCK: Final = 1 << 18
"""Most elements that are converted at once on a CPU, in float32."""
_BLOCK_ELSEWHERE: Final = 1 << 20
"""Most elements otherwise, since each operation of a GPU has to be started."""
_SHARE: Final = 16
"""A block has at most this share of all elements, so that few bytes are needed beyond small buckets."""


def matrices(network: Any) -> frozenset[str]:
    """Return the names of the matrices of a transformers model that FP8 is for: of linear layers, without the head."""
    head = network.get_output_embeddings()
    linear = (name for name, each in network.named_modules() if isinstance(each, nn.Linear) and each is not head)
    return frozenset(f"{name}.weight" for name in linear)


def refusal(network: Any) -> str:
    """Return why a transformers model cannot be in FP8: it multiplies with more than linear layers. Empty if it can."""
    known = matrices(network)
    as_they_are = {id(each.weight) for each in network.modules() if isinstance(each, nn.Embedding)}
    as_they_are.add(id(network.get_output_embeddings().weight))
    named = network.named_parameters()
    others = [name for name, each in named if each.dim() > 1 and name not in known and id(each) not in as_they_are]
    if not others:
        return ""
    return (
        f"this model cannot be in FP8: {len(others)} of its tensors are multiplied with and belong to no linear layer, "
        f"such as {others[0]}"
    )


def write(rows: Tensor, dtype: torch.dtype, scales: Tensor, place: Tensor) -> None:
    """Write rows of a matrix, rounded to `dtype` before, in FP8, and their scales, float32[rows, 1].

    All is computed on the rows' device, and may be written elsewhere. The host waits for nothing.
    """
    most = min(_BLOCK if rows.device.type == "cpu" else _BLOCK_ELSEWHERE, rows.numel() // _SHARE)
    size = max(1, most // max(1, rows.shape[1]))
    for source, scale, numbers in zip(rows.split(size), scales.split(size), place.split(size), strict=True):
        block = source.to(dtype).to(torch.float32, copy=True)
        largest = torch.maximum(block.amax(1, keepdim=True), -block.amin(1, keepdim=True))
        own = (largest * _INVERSE).clamp_min_(_TINY)
        scale.copy_(own)
        numbers.copy_(block.div_(own).clamp_(-_LARGEST, _LARGEST).to(numbers.dtype))


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and its scales, float32[rows, 1]."""
    scales = torch.empty(len(matrix), 1, dtype=torch.float32, device=matrix.device)  # whatever the default is
    numbers = torch.empty(matrix.shape, dtype=getattr(torch, FP8), device=matrix.device)
    write(matrix, matrix.dtype, scales, numbers)
    return numbers, scales
