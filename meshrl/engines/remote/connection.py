"""Frames on Unix sockets between processes of one machine: their content, how they are sent, and where sockets are."""

import asyncio
import fcntl
import io
import os
import pickle
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, Literal, TypeAlias
from weakref import WeakSet

import msgspec
from typing_extensions import Buffer

from meshrl import log
from meshrl.engines.remote.messages import Call, Service
from meshrl.engines.remote.pickling import Pickler
from meshrl.errors import described
from meshrl.mesh import Segment, in_transit, seal_arrays

_LENGTH: Final = Struct("<I")
_CHUNK: Final = 1 << 16
"""Bytes of one read. For 128 KiB and more, the C library may map fresh pages each time."""
LONGEST: Final = (1 << 32) - 1
"""Most bytes of a frame."""
_LONGEST_VALUE: Final = LONGEST - (1 << 16)
TOKEN_BYTES: Final = 32
"""Bytes of the secret that a caller shows first."""


class Question(msgspec.Struct, array_like=True, tag="q", frozen=True):
    """A call, or a request of another service."""

    number: int
    """The number of the question on its connection, from 0."""
    service: Service | Literal["call"]
    call: Call | None
    values: bytes
    """The arguments. Empty if there are none."""


class Answer(msgspec.Struct, array_like=True, tag="a", frozen=True):
    """The answer to a question."""

    number: int
    value: bytes
    """Empty for None."""
    leased: bool = False
    """True if its shared memory is kept until the reader has confirmed it."""
    lost: bool = False
    """True if the value is a text that says why the question was lost."""


class Taken(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """Confirms that the reader has leased the answer's shared memory."""

    number: int


Frame: TypeAlias = Question | Answer | Taken
encode: Final[Callable[[object], bytes]] = msgspec.msgpack.Encoder().encode
decode: Final[Callable[[Buffer], Frame]] = msgspec.msgpack.Decoder(Frame).decode

_PLAIN: Final = (int, float, str, bytes, bool)


def dumped(value: object) -> tuple[bytes, list[Segment]]:
    """Pickle a value, and list its shared memory, to keep until it has arrived."""
    if value is None:
        return b"", []
    segments: list[Segment] = []
    if type(value) in _PLAIN:
        values = pickle.dumps(value, 5)
    else:
        with in_transit() as segments:
            file = io.BytesIO()
            Pickler(file, protocol=5).dump(value)
        values = file.getvalue()
    if len(values) > _LONGEST_VALUE:
        raise TypeError(f"a call's values have {len(values)} bytes, but a call can carry at most {_LONGEST_VALUE}")
    return values, segments


def loaded(values: bytes) -> object:
    """Unpickle a value, with read-only arrays. It comes from a process that has shown the secret of this run."""
    if not values:
        return None
    value: object = pickle.loads(values)  # noqa: S301 -- see above
    seal_arrays(value)
    return value


class Connection:
    """One end, on the loop that runs where it is made. Frames arrive whole and in order."""

    def __init__(
        self, end: socket.socket, received: Callable[[bytes], None], ended: Callable[[], None], most: int = LONGEST
    ) -> None:
        """`received`: gets each frame. `ended`: called once when the other side is gone. `most`: bytes of a frame."""
        end.setblocking(False)
        leave_to_parent(end)
        self.socket = end
        self.most = most
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._ended = ended
        self._arrived = bytearray()
        self._waiting: list[memoryview] = []
        """Bytes that the socket has not taken yet."""
        self._open = True
        self._loop.add_reader(end, self._read)

    def send(self, frame: bytes) -> None:
        """Send a frame, now or when the other side has room. No effect if it is gone."""
        if not self._open:
            return
        whole = _LENGTH.pack(len(frame)) + frame
        if self._waiting:
            self._waiting.append(memoryview(whole))
            return
        sent = self._taken(memoryview(whole))
        if sent < len(whole):
            self._waiting.append(memoryview(whole)[sent:])
            self._loop.add_writer(self.socket, self._write)

    def close(self) -> None:
        """Close this end, without calling `ended`."""
        if self._open:
            self._open = False
            with suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self.socket)
                self._loop.remove_writer(self.socket)
            self.socket.close()

    def _taken(self, part: memoryview) -> int:
        """Return the number of bytes that the socket took."""
        try:
            return self.socket.send(part)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the reader notices it
            return len(part)

    def _write(self) -> None:
        while self._waiting:
            sent = self._taken(self._waiting[0])
            if sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][sent:]
                return
            self._waiting.pop(0)
        self._loop.remove_writer(self.socket)

    def _read(self) -> None:
        try:
            some = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            some = b""
        if not some:
            self._end()
            return
        if self._arrived:
            self._arrived += some
            left = self._deliver(self._arrived)
            del self._arrived[: len(self._arrived) - left]
        elif left := self._deliver(some):
            self._arrived += some[len(some) - left :]

    def _deliver(self, arrived: bytes | bytearray) -> int:
        """Pass on the whole frames. Returns the number of bytes that are left."""
        at, most = 0, len(arrived)
        try:
            while self._open and most - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(arrived, at)
                if length > self.most:
                    self._end()
                    break
                begin, end = at + _LENGTH.size, at + _LENGTH.size + length
                if most < end:
                    break
                at = end
                self._received(bytes(memoryview(arrived)[begin:end]))
        except Exception as error:  # noqa: BLE001 -- deliver no frame twice, and do not wait for a wrong one
            log.warning(f"a connection is closed, because its frame could not be read: {described(error)}")
            self._end()
        return most - at if self._open else 0

    def _end(self) -> None:
        if self._open:
            self.close()
            self._ended()


_sockets: WeakSet[socket.socket] = WeakSet()


def leave_to_parent(own: socket.socket) -> None:
    """Close a socket in forked processes, where it would outlive this process."""
    _sockets.add(own)


def _forked() -> None:
    for own in list(_sockets):
        own.close()


os.register_at_fork(after_in_child=_forked)


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
