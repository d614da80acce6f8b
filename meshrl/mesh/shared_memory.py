"""Shared memory of the processes of a machine: segments are files that one process writes and any other maps.

They are in memory, or on a disk if memory is full. A process that has a segment open holds a lease on it, a file lock
that ends with the process. Segments without a lease are reused, because used pages are several times faster than fresh
ones.
"""

import atexit
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from operator import index
from pathlib import Path
from typing import Final, NamedTuple, Self, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from meshrl import log
from meshrl.errors import DataError
from meshrl.mesh.segment import Bytes, Segment, address_of, leases, open_own, remove
from meshrl.mesh.sharding import Array

FOLDER: Final = Path("/dev/shm")  # noqa: S108 -- memory, under names that nobody can guess
_PREFIX: Final = "meshrl-pool-"
_NAMES: Final = f"{_PREFIX}{'[0-9a-f]' * 8}-{'[0-9a-f]' * 16}"
_WASTE: Final = 2
"""A segment is reused if at least 1 / `_WASTE` of its bytes is needed."""
_SMALLEST: Final = 1 << 16
"""Size in bytes of the smallest array for which shared memory pays."""


def _folders() -> list[Path]:
    """List the folders for segments, the best first."""
    return [folder for folder in (FOLDER, Path(tempfile.gettempdir())) if folder.is_dir()]


class Share(NamedTuple):
    """The shared memory that all processes of a run may keep on each machine."""

    run: str = "0" * 8
    """Eight hexadecimal digits that tell this run's segments from those of other runs."""
    mib: int | None = None
    """Most MiB of `/dev/shm`. None: all that is free."""

    @classmethod
    def of_run(cls, mib: int | None) -> Self:
        """Return the share of a new run, of at most `mib` MiB."""
        return cls(secrets.token_hex(4), mib)

    def new_path(self, folder: Path) -> Path:
        """Return a name that nobody can guess."""
        return folder / f"{_PREFIX}{self.run}-{secrets.token_hex(8)}"

    def taken(self) -> int:
        """Return the bytes of the run's segments in memory, read from the files, so that no kill makes them wrong."""
        total = 0
        for path in FOLDER.glob(f"{_PREFIX}{self.run}-*"):
            with suppress(OSError):  # it was removed just now
                status = path.lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else 0
        return total

    def check(self, folder: Path) -> None:
        """Raise OSError if the run has taken more than its share."""
        if self.mib is not None and folder == FOLDER and self.taken() > self.mib << 20:
            raise OSError(errno.ENOSPC, "the run has no share of the memory left")


class _OwnSegment:
    """A segment that this process made and may write."""

    def __init__(self, folder: Path, nbytes: int, share: Share) -> None:
        """Make a segment. Raises OSError if there is no room."""
        self._share = share
        while True:
            self.path: Path = share.new_path(folder)
            self.file: int = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self.file, fcntl.LOCK_EX)
            with suppress(OSError):  # a sweeper may have been quicker than the lock
                if self.path.stat().st_ino == os.fstat(self.file).st_ino:
                    break
            os.close(self.file)
        try:
            os.ftruncate(self.file, nbytes)  # from here on others count it
            share.check(folder)
            if hasattr(os, "posix_fallocate"):  # raises here, instead of a signal later
                os.posix_fallocate(self.file, 0, nbytes)
            self.nbytes = nbytes
            self.mapping: Final = mmap.mmap(self.file, nbytes)
            self.memory: Final[Bytes] = np.frombuffer(self.mapping, np.uint8)
        except (OSError, ValueError):
            self.close()
            raise
        self.address: Final = address_of(self.memory)
        self.written: bool = False
        self.filled: weakref.ref[Array] | None = None
        """The array in the segment. The segment is handed over once nobody can write to the array."""
        self._is_parents = False

    def try_reuse(self) -> bool:
        """Claim it for writing, unless it is being written or leased. A new name hides its old content.

        Raises FileNotFoundError if it was swept.
        """
        if not self.written:
            return False
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self.file, fcntl.LOCK_SH)  # the failed attempt has released it
            return False
        path = self._share.new_path(self.path.parent)
        self.path.rename(path)
        self.path = path
        self.written = False
        self.filled = None
        return True

    def segment(self, nbytes: int) -> Segment:
        """Return what was written, for all readers."""
        fcntl.flock(self.file, fcntl.LOCK_SH)
        return Segment(str(self.path), nbytes)

    def close(self) -> None:
        """Release the memory, now or when the last lease ends."""
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Close it, but keep its name until the last lease ends, so that processes with the name can still open it."""
        with suppress(BlockingIOError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(self.path, self.file)
        os.close(self.file)

    def finish(self) -> None:
        """Note that nobody in this process writes it or holds its content."""
        self.written = True
        if self._is_parents:
            os.close(self.file)

    def forget(self) -> None:
        """After a fork, leave it to the parent, but prevent its reuse while an array is in it."""
        if self.written:
            os.close(self.file)
            return
        self._is_parents = True
        with suppress(OSError):  # the parent is still writing it
            parents = self.file
            self.file = os.open(f"/proc/self/fd/{parents}", os.O_RDONLY)
            os.close(parents)
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)


class Writing:
    """A segment that is being written."""

    def __init__(self, own: _OwnSegment, nbytes: int) -> None:
        """`nbytes`: the bytes to write, at the beginning of the segment."""
        self._own = own
        self._nbytes = nbytes
        self.memory: Final[Bytes] = own.memory[:nbytes]
        """The memory to fill."""
        self.mapping: Final = own.mapping
        """The whole segment, which may be longer than `memory`."""

    def fills(self, array: Array) -> None:
        """Register an array of any shape in this memory. Its owner makes it read-only once it is filled."""
        self._own.filled = weakref.ref(array)

    def done(self) -> Segment:
        """Return what was written, for all readers."""
        return self._own.segment(self._nbytes)

    def __del__(self) -> None:
        self._own.finish()  # or given up


class Pool:
    """The segments of this process."""

    def __init__(self) -> None:
        self._segments: list[_OwnSegment] = []
        self._lock = threading.Lock()
        self._swept = False
        self._full = False
        self.share: Share = Share()
        """The share that the process may take. If it has several engines, the last one's counts."""
        self.hands_on: bool = False
        """True if others read what this process makes: it is a rank, or it calls ranks that are processes."""
        self.copied = 0
        """Bytes of arrays that were copied into the pool to pass them on."""
        self.gathered = 0
        """Bytes that were copied out of the pool because a reader's rows are not adjacent."""

    def __reduce__(self) -> str:
        return "pool"  # unpickled as the pool of the receiving process

    def join(self, share: Share, *, hands_on: bool) -> None:
        """Join a run and take its share. Segments that were made for another run are released."""
        self.leave()
        self.share = share
        self.hands_on = hands_on

    def write(self, nbytes: int, *, on_disk: bool = True) -> Writing | None:
        """Return `nbytes` of room, with `on_disk` also on a disk. None if this machine has no more."""
        if not nbytes or not _folders():
            return None
        with self._lock:
            if not self._swept:
                self._swept = True
                sweep()
                atexit.register(self.close)
            fit = [own for own in self._segments if nbytes <= own.nbytes <= max(nbytes * _WASTE, mmap.PAGESIZE)]
            own = next((own for own in fit if self._try_reuse(own)), None) or self._new(nbytes, on_disk)
            return Writing(own, nbytes) if own else None

    def find(self, buffer: memoryview) -> tuple[Segment, int] | None:
        """Return the segment that contains read-only bytes, and their offset in it.

        None if they are elsewhere, or seen through a view of an array that can still be written.
        """
        address, nbytes = address_of(buffer), buffer.nbytes
        for own in tuple(self._segments):
            if not own.written and own.address <= address <= own.address + own.nbytes - nbytes:
                array = own.filled() if own.filled else None
                if array is not None and array.flags.writeable:
                    return None
                return own.segment(own.nbytes), address - own.address
        leased = leases.find(address, nbytes)
        return (Segment(leased.path, leased.nbytes), leased.start) if leased else None

    def _try_reuse(self, own: _OwnSegment) -> bool:
        try:
            return own.try_reuse()
        except FileNotFoundError:  # another process took it for the segment of a killed one
            self._segments.remove(own)
            own.close()
            return False

    def _new(self, nbytes: int, on_disk: bool) -> _OwnSegment | None:
        best, *others = _folders() if on_disk else _folders()[:1]
        own = _try_create(best, nbytes, self.share)
        if own is None:
            for each in [each for each in tuple(self._segments) if self._try_reuse(each)]:
                self._segments.remove(each)
                each.close()
            own = _try_create(best, nbytes, self.share)
        if own is None and others and not self._full:
            self._full = True
            log.warning(f"{self.state()}: what ranks hand to each other goes through {others[0]}")
        for folder in others:
            own = own or _try_create(folder, nbytes, self.share)
        if own is not None:
            self._segments.append(own)
        return own

    def state(self) -> str:
        """Describe what is available and what is taken, for people."""
        mine = sum(own.nbytes for own in self._segments) >> 20
        parts = [f"{folder} has {shutil.disk_usage(folder).free >> 20} MiB left" for folder in _folders()]
        parts.append(f"{mine} MiB are this process's")
        advice = "give /dev/shm more, as by `docker run --shm-size`"
        if self.share.mib is not None:
            taken = self.share.taken() >> 20
            parts.append(f"{taken} MiB of {FOLDER} are this run's (run.shared_memory_mib = {self.share.mib})")
            advice = f"raise run.shared_memory_mib, or {advice}"
        return f"{', '.join(parts)}; {advice}"

    def close(self) -> None:
        """Release all memory."""
        for own in self._segments:
            own.close()
        self._segments.clear()

    def leave(self) -> None:
        """Release segments without a reader. The last reader removes the rest."""
        with self._lock:
            for own in [own for own in self._segments if own.written]:  # skip what another thread is writing
                own.leave()
                self._segments.remove(own)

    def forget(self) -> None:
        """Drop the segments after a fork, because they belong to the parent."""
        for own in self._segments:
            own.forget()
        self._segments = []
        self._lock = threading.Lock()
        self._swept = False


def _try_create(folder: Path, nbytes: int, share: Share) -> _OwnSegment | None:
    try:
        return _OwnSegment(folder, nbytes, share)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise DataError(
                f"shared memory cannot be opened: {error.strerror}; raise the limit, `ulimit -n`"
            ) from error
        return None


def sweep() -> None:
    """Remove the segments of killed processes, which are unlocked."""
    for path in (path for folder in _folders() for path in folder.glob(_NAMES)):
        with suppress(OSError):
            file = open_own(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path, file)
            finally:
                os.close(file)


pool: Final = Pool()
"""The pool of this process."""


class _Place(np.ndarray[tuple[int, ...], np.dtype[np.generic]]):
    """The base of an array of `empty`. It keeps the memory from being written again.

    It lies on the mapping itself, because numpy lets a view skip bases of the view's type.
    """

    writing: Writing


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> Array:
    """Make an array of any shape to fill, like `np.empty`.

    It is in shared memory if ranks are processes and there is room.

        tokens = mesh.empty(count, np.int32)
        ...                                                # fill it
        return Batch.of(tokens=Ragged(tokens, offsets))    # nothing is copied

    A `Batch` takes the whole array without a copy. The array is read-only from then on, as after `ragged.frozen`. Views
    that were made before stay writable, because numpy does not know them: do not write through them, others read that
    memory. A part of the array, or a view in another shape, is copied. A process forked in between shares the memory.
    """
    dims = tuple(map(index, (shape,) if isinstance(shape, SupportsIndex) else shape))
    kind = np.dtype(dtype)
    nbytes = prod(dims) * kind.itemsize
    shared = pool.hands_on and nbytes >= _SMALLEST and not kind.hasobject
    writing = pool.write(nbytes, on_disk=False) if shared else None
    if writing is None:
        return np.empty(dims, kind)
    place = _Place(dims, kind, writing.mapping)
    place.writing = writing
    array: Array = np.asarray(place)
    place.flags.writeable = False  # the owner of the memory finds writers through the array and the base of its views
    writing.fills(array)
    return array


def is_in_place(array: Array) -> bool:
    """True if the array, of any shape, is all of an array of `empty`."""
    return isinstance(array.base, _Place)


os.register_at_fork(after_in_child=pool.forget)
