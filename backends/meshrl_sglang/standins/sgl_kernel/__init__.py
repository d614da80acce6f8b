"""Stands for SGLang's kernels, which are built for CUDA. Names are there; what is called says that it is not."""

from collections.abc import Callable
from typing import Final, NoReturn

import torch
from torch import Tensor

_MASK: Final = 0xFFFFFFFF


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(f"this model needs SGLang's kernel {name}, which is not there on this CPU")

    return missing


def _times(values: Tensor, by: int) -> Tensor:
    """Modulo 2^32, without an overflow of 64 bits."""
    return ((values & 0xFFFF) * by + ((((values >> 16) * by) & 0xFFFF) << 16)) & _MASK


def _rotated(values: Tensor, by: int) -> Tensor:
    return ((values << by) | (values >> (32 - by))) & _MASK


def _murmur(seeds: Tensor, places: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3's 32 bits of a row's seed, a token's place and each column: uint32[rows, columns]."""
    seed, place, column = seeds.to(torch.int64)[:, None], places.to(torch.int64)[:, None], columns.to(torch.int64)[None]
    found = torch.zeros(len(seeds), len(columns), dtype=torch.int64)
    for block in (seed & _MASK, (seed >> 32) & _MASK, place & _MASK, column & _MASK):
        mixed = _times(_rotated(_times(block, 0xCC9E2D51), 15), 0x1B873593)
        found = (_times(_rotated(found ^ mixed, 13), 5) + 0xE6546B64) & _MASK
    found = found ^ 16
    for shift, by in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = _times(found ^ (found >> shift), by)
    return (found ^ (found >> 16)).to(torch.uint32)


_library: Final = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur, "CPU")
