"""The folder of a process's sockets, which is removed however the process ends."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "meshrl-at-"
_PATH: Final = 64
"""Bytes of the path of the folder for temporary files, so that a system takes a socket's path, of 104 bytes at most."""
_held: Final[dict[Path, int]] = {}
"""This process's, each open and locked: nobody takes it for one that a killed process left."""


def socket_folder() -> Path:
    """A new folder for sockets, which only this user may enter. What killed processes left is removed."""
    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) <= _PATH else "/tmp"  # noqa: S108 -- `mkdtemp` finds a new name in it
    for left in Path(short).glob(f"{_PREFIX}*"):
        _sweep(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=short))  # with mode 700
        with suppress(FileNotFoundError):  # another process may have swept it before it was locked
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks, on which nobody sweeps either
                fcntl.flock(held, fcntl.LOCK_EX)
            if folder.is_dir():
                _held[folder] = held
                return folder
            os.close(held)


def remove_folder(folder: Path) -> None:
    """Remove a folder of this process's sockets."""
    shutil.rmtree(folder, ignore_errors=True)
    if (held := _held.pop(folder, None)) is not None:
        os.close(held)


def _sweep(left: Path) -> None:
    with suppress(OSError):  # it is another user's, or in use, or has just gone
        if left.lstat().st_uid != os.geteuid():
            return
        file = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        finally:
            os.close(file)
