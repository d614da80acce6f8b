"""The one writer of a run's folder."""

import errno
import fcntl
import os
import secrets
import socket
import weakref
from pathlib import Path
from typing import Final

import msgspec

from meshrl.errors import ConfigError, DataError

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What a file system says that has none."""


class Owner(msgspec.Struct, frozen=True):
    """Who writes a folder."""

    host: str
    pid: int
    token: str
    """Told apart by this alone: a process's number comes again."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderLock:
    """Held from before a run touches its folder until it has written its last file.

    The kernel locks the file `.NAME.lock` beside the folder, and lets go when the process ends, however it ends. Some
    file systems do not tell other hosts of locks: there the one who came last owns the folder, and `check` tells the
    other before it writes.
    """

    def __init__(self, folder: Path) -> None:
        """ConfigError where another run writes the folder."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder.parent.resolve() / f".{folder.name}.lock"
        self._own = msgspec.json.encode(Owner(socket.gethostname(), os.getpid(), secrets.token_hex(8)))
        self._descriptors = [self._locked()]
        os.ftruncate(self._descriptors[0], 0)
        os.pwrite(self._descriptors[0], self._own, 0)
        self.release = weakref.finalize(self, _release, self._file, self._descriptors, self._own)
        """Let the next run have the folder."""

    def hold(self) -> None:
        """Write to the folder that is there at the first call, and to no other that takes its name."""
        if len(self._descriptors) == 1:
            self._descriptors.append(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY))

    def check(self) -> None:
        """DataError where another process owns the folder by now, or it is no longer the one that was held."""
        owner = _read(self._file)
        if owner != self._own:
            raise DataError(
                f"{self._folder} was taken over by {_told(owner)}: this run writes nothing there any more. A file "
                "system that tells other hosts of locks would have refused that run; give each its own run.name"
            )
        if any(not _is_at(self._folder, held) for held in self._descriptors[1:]):
            raise DataError(
                f"{self._folder} was moved, removed or replaced while the run wrote it: this run writes nothing there "
                "any more. Put the folder back, and start the run again with run.resume=true"
            )

    def _locked(self) -> int:
        """The file, open and locked."""
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    raise ConfigError(
                        f"{self._folder} is being written by {_told(_read(self._file))}: wait for the end of that run, "
                        "or give this one another run.name"
                    ) from None
                if error.errno not in _NO_LOCKS:
                    raise
                return os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            if _is_at(self._file, descriptor):
                return descriptor
            os.close(descriptor)  # whoever had it removed it in the meantime


def _release(file: Path, descriptors: list[int], own: bytes) -> None:
    if _read(file) == own:
        file.unlink(missing_ok=True)
    for descriptor in descriptors:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def _told(owner: bytes) -> str:
    try:
        return str(msgspec.json.decode(owner, type=Owner))
    except msgspec.DecodeError:
        return "another process"
