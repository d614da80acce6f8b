"""Shared memory for arriving weights, mapped once, because mapping its pages takes longer than reading them."""

import mmap
import os
from pathlib import Path
from threading import Lock
from typing import Final

_kept: Final[dict[int, "_Mapped"]] = {}
"""By inode number, which is unique while the file exists."""
_lock: Final = Lock()


def mapped(path: str) -> mmap.mmap:
    """Map a file that its writer uses again and again, for readers that require writable memory.

    Do not write to it: a written page would hide later changes of its writer. Kept until another one is requested after
    its writer has removed it.
    """
    with _lock, Path(path).open("rb") as file:
        number = os.fstat(file.fileno()).st_ino
        if number not in _kept:
            for each in [each for each, one in _kept.items() if one.removed]:
                del _kept[each]
            _kept[number] = _Mapped(os.dup(file.fileno()))
        return _kept[number].memory


class _Mapped:
    def __init__(self, file: int) -> None:
        self._file = file
        self.memory: Final = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)

    @property
    def removed(self) -> bool:
        """True if the file has no name any more."""
        return not os.fstat(self._file).st_nlink

    def __del__(self) -> None:
        os.close(self._file)
