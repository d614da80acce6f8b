"""Shared memory that weights arrive in, mapped once: to make a mapping's pages takes longer than to read them."""

import mmap
import os
from pathlib import Path
from threading import Lock
from typing import Final

_kept: Final[dict[int, "_Mapped"]] = {}
"""By the file's number, which no other file gets meanwhile."""
_lock: Final = Lock()


def mapped(path: str) -> mmap.mmap:
    """The bytes of a file that its writer uses again and again, for readers that want memory that they could write.

    Not to be written: a page that was written here hides what its writer makes of it later. Kept until another one is
    asked for after its writer has removed it.
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
        """Whether the file has no name any more."""
        return not os.fstat(self._file).st_nlink

    def __del__(self) -> None:
        os.close(self._file)
