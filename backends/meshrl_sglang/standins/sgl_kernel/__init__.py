"""Replaces SGLang's kernels, which are built for CUDA. The names exist, and calls raise an error."""

from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Words = NDArray[np.uint32]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(f"this model needs SGLang's kernel {name}, which is not there on this CPU")

    return missing


def _rotated(values: _Words, by: int) -> _Words:
    return (values << np.uint32(by)) | (values >> np.uint32(32 - by))


def _mixed(hashed: _Words, block: _Words) -> _Words:
    """Mix one more block of 32 bits into a hash."""
    block = _rotated(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(hashed ^ block, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _murmur(seeds: Tensor, places: Tensor, columns: Tensor) -> Tensor:
    """Hash a row's seed, a token's place and each column by 32-bit MurmurHash3: uint32[rows, columns].

    Uses numpy, whose 32-bit integers wrap around, and which is ten times faster than torch here.
    """
    seed = seeds.numpy().view(np.uint64)
    found = np.zeros((len(seed), 1), np.uint32)
    for block in (seed, seed >> np.uint64(32), places.numpy()):
        found = _mixed(found, block.astype(np.uint32)[:, None])
    found = _mixed(found, columns.numpy().astype(np.uint32))
    found ^= np.uint32(16)
    for shift, by in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found ^= found >> np.uint32(shift)
        found *= np.uint32(by)
    found ^= found >> np.uint32(16)
    return torch.from_numpy(found)


_library: Final = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur, "CPU")
