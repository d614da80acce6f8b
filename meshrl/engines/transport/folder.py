"""The folder of a process's sockets. It is removed however the process ends."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "meshrl-at-"
_PATH: Final = 64
"""Most bytes of the temporary folder's path, so that socket paths stay within a system's 104 bytes."""
_held: Final[dict[Path, int]] = {}
"""The open and locked folders of this process. The lock shows that they are in use."""


def socket_folder() -> Path:
    """Make a folder for sockets that only this user may enter. Removes the folders of killed processes."""
    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) <= _PATH else "/tmp"  # noqa: S108 -- `mkdtemp` finds a new name in it
    for left in Path(short).glob(f"{_PREFIX}*"):
        _sweep(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=short))  # with mode 700
        with suppress(FileNotFoundError):  # another process may sweep it before it is locked
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks, on which nobody sweeps
                fcntl.flock(held, fcntl.LOCK_EX)
            if folder.is_dir():
                _held[folder] = held
                return folder
            os.close(held)


def remove_folder(folder: Path) -> None:
    """Remove a socket folder of this process."""
    shutil.rmtree(folder, ignore_errors=True)
    if (held := _held.pop(folder, None)) is not None:
        os.close(held)


def _sweep(left: Path) -> None:
    with suppress(OSError):  # of another user, in use, or just removed
        if left.lstat().st_uid != os.geteuid():
            return
        file = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        finally:
            os.close(file)
