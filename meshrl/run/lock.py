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
from meshrl.mesh import boot_id

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without locks."""
_COPIES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables in which launchers say how many copies of a command they have started."""
_LEASE: Final = 30.0
"""Seconds without a sign of life after which an owner counts as dead."""
_BEATS: Final = 6
"""Number of signs of life in that time."""


class Owner(msgspec.Struct, frozen=True):
    """A process that writes a folder."""

    host: str
    pid: int
    token: str
    """Identifies the owner. Process ids are reused."""
    machine: str = ""
    """The kernel of its machine. If this machine locks the file, no other owner on it is alive."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderLock:
    """A lock held from before a run touches its folder until it has written its last file.

    The kernel locks the file `.NAME.lock` next to the folder, and releases it when the process ends, however it ends.
    Some file systems do not report locks of other hosts, so the lock is a lease too. A thread of the owner touches the
    file every few seconds. A process that finds another host's owner in the file watches whether the file is touched.
    If it is, the process is refused. The clocks of the hosts do not matter. An owner that was suspended until another
    took the folder learns it from `check` before it writes.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if another run writes the folder, or if it cannot be written."""
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
        self.release: weakref.finalize[..., FolderLock] = weakref.finalize(
            self, _release, self._file, self._descriptors, self._own, stopped, beats
        )
        """Releases the folder for the next run."""

    def hold(self) -> None:
        """Write only to the folder that exists at the first call, and to none that takes its name later."""
        if len(self._descriptors) == 1:
            self._descriptors.append(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY))

    @property
    def is_held(self) -> bool:
        """True until the run releases the folder."""
        return self.release.alive

    def check(self) -> None:
        """Raise DataError if another process owns the folder by now, or if the folder was replaced."""
        content = _read(self._file)
        if content != self._own:
            raise DataError(
                f"{self._folder} was taken over by {_owner(content) or 'another process'}: this run no longer writes "
                f"there. Either it was suspended for more than {_LEASE:g} s, or both started at once on a file system "
                "without locks between hosts. Give each its own run.name"
            )
        if any(not _is_at(self._folder, held) for held in self._descriptors[1:]):
            raise DataError(
                f"{self._folder} was moved, removed or replaced during the run: this run no longer writes there. "
                "Restore the folder, and start the run again with run.resume=true"
            )

    def _locked(self, own: Owner) -> int:
        """Open and lock the file, once no living process owns it."""
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                is_locked = _lock(descriptor)
                if is_locked is False:
                    self._refuse()
                before = _owner(_read(self._file))
                if before and (is_locked is None or before.machine != own.machine):
                    self._outwait(before)
            except BaseException:
                os.close(descriptor)
                raise
            if _is_at(self._file, descriptor):
                return descriptor
            os.close(descriptor)  # its owner has just removed it

    def _outwait(self, before: Owner) -> None:
        """Watch an owner without a visible lock until its lease ends. Raises ConfigError if it is alive."""
        log.info(f"{self._folder}: {before} has not released it: watching for {_LEASE:g} s whether it still runs")
        touched, end = _touched(self._file), time.monotonic() + _LEASE
        while touched is not None:
            is_last = time.monotonic() >= end  # checked first, because this process may be suspended at any moment too
            time.sleep(_LEASE / _BEATS / 4)
            if (now := _touched(self._file)) is not None and now != touched:
                self._refuse()
            if is_last:
                return
            touched = now

    def _refuse(self) -> None:
        owner = _owner(_read(self._file))
        elsewhere = owner is not None and owner.machine != _machine()
        gone = f", or, if that host is gone for good, remove {self._file}" if elsewhere else ""
        copies = [f"{name} = {os.environ[name]}" for name in _COPIES if os.environ.get(name, "1") not in ("0", "1")]
        launched = copies and (
            f". If a launcher has started this command several times ({copies[0]}), leave torchrun, accelerate, mpirun "
            "or srun out: one process starts all ranks, as run.engine and run.meshes say"
        )
        raise ConfigError(
            f"{self._folder} is being written by {owner or 'another process'}: wait for the end of that run, or give "
            f"this one another run.name{gone}{launched or ''}"
        )


def _lock(descriptor: int) -> bool | None:
    """Return True if the kernel grants the file's lock. None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _beat(descriptor: int, stopped: threading.Event) -> None:
    while not stopped.wait(_LEASE / _BEATS):
        with suppress(OSError):  # the file system may be unavailable for a while
            os.utime(descriptor)


def _release(file: Path, descriptors: list[int], own: bytes, stopped: threading.Event, beats: threading.Thread) -> None:
    stopped.set()
    beats.join()
    if _read(file) == own:
        file.unlink(missing_ok=True)
    for descriptor in descriptors:
        os.close(descriptor)


def _machine() -> str:
    """Identify this machine for all of its processes, and its start if that is known."""
    return boot_id() if Path("/proc/sys/kernel/random/boot_id").is_file() else f"{uuid.getnode():x}"


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _read(file: Path) -> bytes:
    with suppress(FileNotFoundError):
        return file.read_bytes()
    return b""


def _touched(file: Path) -> int | None:
    """Return when the file was touched, in nanoseconds of the clock that stamps it. None if it is gone."""
    # Network file systems refresh attributes only on open.
    with suppress(FileNotFoundError), file.open("rb") as opened:
        return os.fstat(opened.fileno()).st_mtime_ns
    return None


def _owner(content: bytes) -> Owner | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(content, type=Owner)
    return None
