"""Weights in shared memory, where the engine's process reads them."""

import secrets
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from meshrl.weights import Weights
from meshrl_vllm.messages import Part

_SHARED: Final = Path("/dev/shm")  # noqa: S108 -- memory, under a name that nobody can guess
_ALIGNED: Final = 64
"""Bytes: each tensor starts at a multiple."""


class Segment:
    """A file in shared memory, which is written anew for each weights: its pages are made once."""

    def __init__(self) -> None:
        self.path: Final = _SHARED / f"meshrl-{secrets.token_hex(8)}"
        self._memory: np.memmap[tuple[int], np.dtype[np.uint8]] | None = None

    def write(self, weights: Weights) -> list[Part]:
        """Copy the tensors; what lies where."""
        starts: dict[str, int] = {}
        end = 0
        for name, array in weights.tensors.items():
            starts[name] = end
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        if self._memory is None or len(self._memory) < end:
            self._memory = np.memmap(self.path, np.uint8, "w+", shape=(max(end, 1),))
        parts: list[Part] = []
        for name, array in weights.tensors.items():
            place = self._memory[starts[name] : starts[name] + array.nbytes]
            np.copyto(place, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            checksum = zlib.crc32(place.data)
            parts.append(Part(name, array.dtype.name, list(array.shape), starts[name], checksum))
        return parts

    def close(self) -> None:
        """Give the memory back."""
        self._memory = None
        self.path.unlink(missing_ok=True)
