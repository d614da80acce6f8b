"""The lock of a run's folder, which admits one writer."""

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, DataError

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What a file system says that has none."""
_LEASE: Final = 30.0
"""Seconds after which an owner that has not shown that it lives is taken for dead."""
_BEATS: Final = 6
"""How often an owner shows it in that time."""


class Owner(msgspec.Struct, frozen=True):
    """Who writes a folder."""

    host: str
    pid: int
    token: str
    """Told apart by this alone: a process's number comes again."""
    machine: str = ""
    """The kernel that it runs under: one that locks the file lets no other owner of its own live."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderLock:
    """Held from before a run touches its folder until it has written its last file.

    The kernel locks the file `.NAME.lock` beside the folder, and lets go when the process ends, however it ends. Some
    file systems do not tell other hosts of locks. So the lock is a lease too: its owner touches the file every few
    seconds, from a thread. Who finds the name of another host's process in the file watches whether it is touched, and
    is refused if it is; the two hosts' clocks do not matter. An owner that was stopped for so long that another took
    the folder is told by `check` before it writes.
    """

    def __init__(self, folder: Path) -> None:
        """ConfigError where another run writes the folder, and where it cannot be written."""
        self._folder = folder
        self._file = folder.parent.resolve() / f".{folder.name}.lock"
        own = Owner(socket.gethostname(), os.getpid(), secrets.token_hex(8), _machine())
        self._own = msgspec.json.encode(own)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._descriptors = [self._locked(own)]
            os.ftruncate(self._descriptors[0], 0)
            os.pwrite(self._descriptors[0], self._own, 0)
        except OSError as error:
            raise ConfigError(
                f"{self._file} cannot be written: {error.strerror}: the run's files belong there. Set run.folder to a "
                "place where you may write, or make room"
            ) from error
        stopped = threading.Event()
        beats = threading.Thread(target=_beat, args=(self._descriptors[0], stopped), name="meshrl-lease", daemon=True)
        beats.start()
        leased = self._file, self._descriptors, self._own, stopped, beats
        self.release: weakref.finalize[..., FolderLock] = weakref.finalize(self, _release, *leased)
        """Let the next run have the folder."""

    def hold(self) -> None:
        """Write to the folder that is there at the first call, and to no other that takes its name."""
        if len(self._descriptors) == 1:
            self._descriptors.append(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY))

    @property
    def is_held(self) -> bool:
        """Whether the run has not let go of the folder."""
        return self.release.alive

    def check(self) -> None:
        """DataError where another process owns the folder by now, or it is no longer the one that was held."""
        owner = _read(self._file)
        if owner != self._own:
            raise DataError(
                f"{self._folder} was taken over by {_told(owner)}: this run no longer writes there. Either it was "
                f"suspended for more than {_LEASE:g} s, or both started at once on a file system without locks "
                "between hosts. Give each its own run.name"
            )
        if any(not _is_at(self._folder, held) for held in self._descriptors[1:]):
            raise DataError(
                f"{self._folder} was moved, removed or replaced during the run: this run no longer writes there. "
                "Restore the folder, and start the run again with run.resume=true"
            )

    def _locked(self, own: Owner) -> int:
        """The file, open and locked, that no living process owns."""
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                is_locked = _lock(descriptor)
                if not is_locked:
                    self._refuse()
                before = _owner(_read(self._file))
                if before and (is_locked is None or before.machine != own.machine):
                    self._outwait(before)
            except BaseException:
                os.close(descriptor)
                raise
            if _is_at(self._file, descriptor):
                return descriptor
            os.close(descriptor)  # whoever had it removed it in the meantime

    def _outwait(self, before: Owner) -> None:
        """Watch an owner of whom no lock tells, until it lets go or its lease ends. ConfigError where it lives."""
        log.info(f"{self._folder}: {before} has not released it: watching for {_LEASE:g} s whether it still runs")
        touched, end = _touched(self._file), time.monotonic() + _LEASE
        while touched is not None:
            is_last = time.monotonic() >= end  # before a look: this process may be stopped at any moment, too
            time.sleep(_LEASE / _BEATS / 4)
            if (now := _touched(self._file)) is not None and now != touched:
                self._refuse()
            if is_last:
                return
            touched = now

    def _refuse(self) -> None:
        owner = _read(self._file)
        there = _owner(owner)
        gone = (
            f", or, if that host is gone for good, remove {self._file}" if there and there.machine != _machine() else ""
        )
        raise ConfigError(
            f"{self._folder} is being written by {_told(owner)}: wait for the end of that run, or give this one "
            f"another run.name{gone}"
        )


def _lock(descriptor: int) -> bool | None:
    """Whether the kernel gives the file's lock; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _beat(descriptor: int, stopped: threading.Event) -> None:
    """Touch the file again and again."""
    while not stopped.wait(_LEASE / _BEATS):
        with suppress(OSError):  # a file system that is away for a while
            os.utime(descriptor)


def _release(file: Path, descriptors: list[int], own: bytes, stopped: threading.Event, beats: threading.Thread) -> None:
    stopped.set()
    beats.join()
    if _read(file) == own:
        file.unlink(missing_ok=True)
    for descriptor in descriptors:
        os.close(descriptor)


def _machine() -> str:
    """What tells this kernel from those of other hosts, and from itself after a restart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text("ascii").strip() if boot.is_file() else f"{uuid.getnode():x}"


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


def _touched(file: Path) -> int | None:
    """When it was, in nanoseconds of whoever keeps the file; None where it is gone.

    Opened, not asked by name: file systems of networks look again what is true when a file is opened.
    """
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _owner(content: bytes) -> Owner | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(content, type=Owner)
    return None


def _told(content: bytes) -> str:
    return str(_owner(content) or "another process")
