"""Read-only mappings of shared-memory segments.

A mapping stays in the process after its last lease, because mapping pages again costs more than reading them.
"""

import fcntl
import mmap
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshrl.errors import DataError

Bytes: TypeAlias = NDArray[np.uint8]

_IDLE, _MOST = 1 << 30, 256
"""Maximum bytes and files that stay mapped without a reader in this process."""
_POPULATE_READ: Final = 22
"""Linux's advice to map all existing pages at once."""
_LARGE: Final = 1 << 20
"""Size in bytes of the smallest segment for which that advice pays."""

_Place: TypeAlias = tuple[int, int]
"""Device and inode number of a file, which a rename keeps."""


class _Location(NamedTuple):
    """The location of some bytes in a segment."""

    path: str
    nbytes: int
    """Size of the segment."""
    start: int


def address_of(memory: "mmap.mmap | memoryview | Bytes") -> int:
    """Return the address of some bytes in this process."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def open_own(path: Path, flags: int) -> int:
    """Open a segment and return its descriptor. OSError if the file is of another kind or of another user.

    The folder is world-writable, so another user could create a file with a known name.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(file)
        raise FileNotFoundError(path)
    return file


def remove(path: Path, file: int) -> None:
    """Remove a segment that only this process has locked. Its pages are freed at once, even if others map them."""
    with suppress(OSError):  # on systems that do not show open files
        os.truncate(f"/proc/self/fd/{file}", 0)
    path.unlink(missing_ok=True)


class _Mapped:
    """An open file, mapped from its first reader on."""

    def __init__(self, file: int, place: _Place, nbytes: int) -> None:
        self.file: int = file
        self.place: Final = place
        self.nbytes: Final = nbytes
        self.leases = 0
        self.path = ""
        """Its name, which stays while it is leased."""
        self.address: int = 0
        """The address of its mapping."""
        self._memory: mmap.mmap | None = None

    @property
    def memory(self) -> mmap.mmap:
        """All its bytes. Raises DataError if a fork lost them."""
        if self._memory is None:
            if self.file < 0:
                raise DataError(f"{self.nbytes} bytes in shared memory are not this process's: load them before a fork")
            self._memory = mmap.mmap(self.file, self.nbytes, prot=mmap.PROT_READ)
            self.address = address_of(self._memory)
            if self.nbytes >= _LARGE:
                with suppress(OSError):  # of other systems, which map pages one by one
                    self._memory.madvise(_POPULATE_READ)
        return self._memory

    def is_gone(self) -> bool:
        """True if its owner has released the memory."""
        return os.fstat(self.file).st_nlink == 0

    def close(self) -> None:
        """Close the file, which releases its lock."""
        os.close(self.file)
        self.file = -1

    def own_lock(self) -> None:
        """Take a lock of this process after a fork, instead of the one shared with the parent."""
        shared = self.file
        try:
            self.file = os.open(f"/proc/self/fd/{shared}", os.O_RDONLY)
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.file = -1
        os.close(shared)


class _Leases:
    """The open segments of this process, by place. Those without a reader are kept oldest first."""

    def __init__(self) -> None:
        self._open: dict[_Place, _Mapped] = {}
        self._idle: dict[_Place, _Mapped] = {}
        self._lock = threading.RLock()
        self._busy = False
        """True while this thread holds the lock. Garbage collection may end a lease in this thread at any moment."""
        self._ended: list[tuple[_Mapped, str]] = []

    def take(self, path: str) -> _Mapped:
        """Lease the segment of this name. OSError if there is none, or it is being reused."""
        with self._lock:
            self._busy = True
            try:
                return self._taken(path)
            finally:
                self._end_all()

    def _taken(self, path: str) -> _Mapped:
        status = Path(path).lstat()
        mapped = self._open.get((status.st_dev, status.st_ino)) or self._opened(path)
        if not mapped.leases:
            fcntl.flock(mapped.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            try:
                if Path(path).lstat().st_ino != mapped.place[1]:
                    raise FileNotFoundError(path)  # it was reused before the lease
            except OSError:
                fcntl.flock(mapped.file, fcntl.LOCK_UN)
                raise
        self._idle.pop(mapped.place, None)
        mapped.leases += 1
        mapped.path = path
        return mapped

    def find(self, address: int, nbytes: int) -> _Location | None:
        """Return the leased segment that contains these bytes. The caller must have a view of it."""
        with self._lock:
            self._busy = True
            try:
                for mapped in self._open.values():
                    if mapped.leases and mapped.address <= address <= mapped.address + mapped.nbytes - nbytes:
                        return _Location(mapped.path, mapped.nbytes, address - mapped.address)
                return None
            finally:
                self._end_all()

    def _opened(self, path: str) -> _Mapped:
        for idle in list(self._idle.values()):
            if idle.is_gone():
                self._drop(idle)
        file = open_own(Path(path), os.O_RDONLY)
        status = os.fstat(file)
        place = status.st_dev, status.st_ino
        mapped = self._open[place] = self._idle[place] = _Mapped(file, place, status.st_size)
        return mapped

    def release(self, mapped: _Mapped, path: str) -> None:
        """End a lease. The last reader of all processes removes the segment of a writer that has died."""
        self._ended.append((mapped, path))
        with self._lock:
            if not self._busy:
                self._end_all()

    def _end_all(self) -> None:
        self._busy = True
        while self._ended:
            self._end(*self._ended.pop())
        self._busy = False

    def _end(self, mapped: _Mapped, path: str) -> None:
        mapped.leases -= 1
        if mapped.leases or mapped.file < 0:
            return
        with suppress(OSError):  # its writer is alive, or another process reads it
            fcntl.flock(mapped.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(Path(path), mapped.file)
        fcntl.flock(mapped.file, fcntl.LOCK_UN)
        self._idle[mapped.place] = mapped
        left = sum(idle.nbytes for idle in self._idle.values())
        for idle in list(self._idle.values()):
            if idle.is_gone() or left > _IDLE or len(self._idle) > _MOST:
                left -= idle.nbytes
                self._drop(idle)

    def _drop(self, idle: _Mapped) -> None:
        del self._idle[idle.place], self._open[idle.place]
        idle.close()

    def forget(self) -> None:
        """After a fork, give leased segments their own locks and drop the rest, which are the parent's."""
        self._lock = threading.RLock()
        self._busy = False
        for mapped in self._idle.values():
            mapped.close()
        self._open = {place: mapped for place, mapped in self._open.items() if mapped.leases}
        self._idle = {}
        for mapped in self._open.values():
            mapped.own_lock()


class Segment:
    """A read-only segment, which stays mapped and leased while this object or a view of `memory` exists."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Open a segment of `nbytes` bytes. Raises DataError if it had no lease and was reused."""
        self.path: Final = path
        self.nbytes: Final = nbytes
        try:
            self._mapped: Final = leases.take(path)
        except OSError as error:
            raise DataError(f"{nbytes} bytes in this machine's shared memory are gone: {error}") from None

    @property
    def memory(self) -> Bytes:
        """The bytes, uint8[nbytes]."""
        view = _View((self.nbytes,), np.uint8, self._mapped.memory)
        view.segment = self
        return np.asarray(view)

    def __del__(self) -> None:
        if hasattr(self, "_mapped"):
            leases.release(self._mapped, self.path)


class _View(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
    """The base of arrays that view a segment. It holds the lease.

    It lies on the mapping itself, because numpy lets a view skip bases of the view's type.
    """

    segment: Segment


leases: Final = _Leases()
"""The leases of this process."""
os.register_at_fork(after_in_child=leases.forget)
