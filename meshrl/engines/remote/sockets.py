"""Calls through a socket to a process of this machine: the frames, the caller's end, and the end of the `Host`."""

import asyncio
import errno
import fcntl
import io
import os
import pickle
import shutil
import socket
import struct
import tempfile
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakSet

import msgspec
from typing_extensions import Buffer

from meshrl import log
from meshrl.engines.remote.host import Host
from meshrl.engines.remote.messages import (
    NO_ARGUMENTS,
    Arguments,
    Call,
    Channel,
    MessageLost,
    Pickler,
    ProcessExited,
    Reply,
    Service,
)
from meshrl.errors import described
from meshrl.mesh import Segment, in_transit, seal_arrays, when_here

_LENGTH: Final = struct.Struct("<I")
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


class Acknowledgement(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """Confirms that the reader has leased the answer's shared memory."""

    number: int


Frame: TypeAlias = Question | Answer | Acknowledgement
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
        self._waiting: deque[memoryview] = deque()
        """Bytes that the socket has not taken yet."""
        self._is_writing = False
        """True while the loop waits for room in the socket."""
        self._open = True
        self._loop.add_reader(end, self._read)

    def send(self, frame: bytes) -> None:
        """Send a frame, now or when the other side has room. No effect if it is gone."""
        if self._open:
            self._waiting.append(memoryview(_LENGTH.pack(len(frame)) + frame))
            if not self._is_writing:
                self._write()

    def close(self) -> None:
        """Close this end, without calling `ended`."""
        if self._open:
            self._open = False
            with suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self.socket)
                self._loop.remove_writer(self.socket)
            self.socket.close()

    def _write(self) -> None:
        """Send what the socket takes now, and the rest when it has room."""
        while self._waiting:
            part = self._waiting[0]
            try:
                sent = self.socket.send(part)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:  # the reader notices it
                sent = len(part)
            if sent < len(part):
                self._waiting[0] = part[sent:]
                if not self._is_writing:
                    self._is_writing = True
                    self._loop.add_writer(self.socket, self._write)
                return
            self._waiting.popleft()
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self.socket)

    def _read(self) -> None:
        """Pass on the whole frames that have arrived."""
        try:
            some = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            some = b""
        if not some:
            self._end()
            return
        arrived: bytes | bytearray = some
        if self._arrived:
            self._arrived += some
            arrived = self._arrived
        at = 0
        try:
            while self._open and len(arrived) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(arrived, at)
                begin = at + _LENGTH.size
                if length > self.most:
                    self._end()
                elif len(arrived) < begin + length:
                    break
                else:
                    at = begin + length
                    self._received(bytes(memoryview(arrived)[begin:at]))
        except Exception as error:  # noqa: BLE001 -- deliver no frame twice, and do not wait for a wrong one
            log.warning(f"a connection is closed, because its frame could not be read: {described(error)}")
            self._end()
        if arrived is some:
            self._arrived += some[at:]
        else:
            del self._arrived[:at]

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


NEWS: Final = 1.0
"""Most seconds from the end of a connection to the report how the process ended. It takes milliseconds."""
_BACKLOG: Final = 1024
_PAUSE: Final = 1.0
"""Seconds before a server accepts again when its process has too many open files."""


class Address(NamedTuple):
    """The address of a process."""

    path: str
    token: bytes


class SocketChannel(Channel):
    """The channel to one process of this machine. It connects on first use, in the process that uses it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.end: asyncio.Future[str] | None = None
        """How the process ended, if it is watched from here."""
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["SocketChannel"], tuple[Address]]:
        return SocketChannel, (self.address,)

    def prepare(self, arguments: Arguments | None) -> Callable[[Call], Reply]:
        """Pickle a call's arguments, and return what sends the call."""
        return partial(self._client().ask, "call", *dumped(arguments))

    def request(self, service: Service, *arguments: object) -> Reply:
        """Send another request, and return its reply."""
        return self._client().ask(service, *dumped(arguments or None))

    def notify(self, service: Service, *arguments: object) -> None:
        """Send a request that needs no answer."""
        self._client().notify(service, arguments)

    def close(self, reason: str = "its engine was closed") -> None:
        """Drop the process. Waiting tasks get `ProcessExited` with the reason."""
        for client in list(self._clients.values()):
            client.close(reason)

    def _client(self) -> "_Client":
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = _Client(self.address, self.end)
        return client


class _Client:
    """The caller's end of the connection, on the loop that made it."""

    def __init__(self, address: Address, end: "asyncio.Future[str] | None") -> None:
        self._end = end
        self._questions_sent = 0
        self._waiting: dict[int, tuple[Reply, list[Segment]]] = {}
        """The replies that are awaited, and the segments of each question that are kept until then."""
        self._exit_reason = ""
        self._connection: Connection | None = None
        try:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self._exit_reason = f"it cannot be reached ({error.strerror or error})"
            return
        try:
            peer.connect(address.path)
        except OSError as error:
            peer.close()
            self._exit_reason = f"nobody answers there ({error.strerror or error})"
            return
        self._connection = Connection(peer, self._received, self._ended)
        self._connection.send(address.token)
        if end is not None:  # its forked children may hold the connection
            end.add_done_callback(self._exited)

    def ask(
        self, service: Service | Literal["call"], values: bytes, segments: "list[Segment]", call: Call | None = None
    ) -> Reply:
        """Send a question, and return its reply. `segments`: kept until the reply has arrived."""
        if self._connection is None:
            reply = Reply()
            reply.arrive(None, ProcessExited(self._exit_reason))
            return reply
        number = self._questions_sent
        self._questions_sent += 1
        self._connection.send(encode(Question(number, service, call, values)))
        reply = Reply()
        self._waiting[number] = reply, segments
        return reply

    def notify(self, service: Service, arguments: object) -> None:
        """Send a message that needs no answer."""
        if self._connection is not None:
            values, _ = dumped(arguments)
            self._connection.send(encode(Question(-1, service, None, values)))

    def close(self, reason: str) -> None:
        """Drop the process. Waiting tasks get `ProcessExited` with the reason."""
        if self._connection is not None:
            self._connection.close()
            self._fail(reason)

    def _received(self, frame: bytes) -> None:
        answer = decode(frame)
        if not isinstance(answer, Answer):
            return
        reply, _ = self._waiting.pop(answer.number)
        if answer.lost:
            reason, _, text = answer.value.decode().partition("\n")
            reply.arrive(None, MessageLost(reason, text))
            return
        value, error = None, None
        try:
            value = loaded(answer.value)
        except BaseException as failure:  # noqa: BLE001 -- a value's code may raise anything; the waiter gets it
            error = MessageLost("".join(traceback.format_exception_only(failure)).strip())
        reply.arrive(value, error)
        if answer.leased and self._connection is not None:
            self._connection.send(encode(Acknowledgement(answer.number)))

    def _ended(self) -> None:
        """The process is gone. Tell waiting tasks how it ended, if that is known in a moment."""
        self._connection = None
        self._exit_reason = "it was killed, ran out of memory or crashed"
        if self._end is None or self._end.done():
            self._fail(self._end.result() if self._end else self._exit_reason)
        else:
            asyncio.get_running_loop().call_later(NEWS, self._give_up, self._end)

    def _give_up(self, end: "asyncio.Future[str]") -> None:
        if not end.done():
            self._fail(self._exit_reason)

    def _exited(self, end: "asyncio.Future[str]") -> None:
        if self._connection is not None:
            self._connection.close()
        self._fail(end.result())

    def _fail(self, reason: str) -> None:
        self._connection = None
        self._exit_reason = reason
        waiting, self._waiting = self._waiting, {}
        for reply, _ in waiting.values():
            reply.arrive(None, ProcessExited(reason))


def listen(path: Path) -> socket.socket:
    """Open a socket at a path, which accepts connections from now on."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(_BACKLOG)
    return listening


class Server:
    """Accepts connections for a `Host`, on the loop that runs where it is made, if a caller knows the run's secret."""

    def __init__(self, listening: socket.socket, token: bytes, host: Host) -> None:
        listening.setblocking(False)
        leave_to_parent(listening)
        self._listening = listening
        self._token = token
        self._host = host
        self._peers: set[_Peer] = set()
        asyncio.get_running_loop().add_reader(listening, self._accept)

    def _accept(self) -> None:
        try:
            end, _ = self._listening.accept()
        except OSError as error:  # it left before it was accepted, or there is no room now
            if error.errno in (errno.EMFILE, errno.ENFILE):
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(_PAUSE, loop.add_reader, self._listening, self._accept)
                log.warning(f"a calling process must wait: {error.strerror}")
            return
        if (user := _user(end)) not in (None, os.geteuid()):
            log.warning(f"a process of user {user} is refused, because it is not this run's user")
            end.close()
            return
        self._peers.add(_Peer(end, self._token, self._host, self._peers))


def _user(end: socket.socket) -> int | None:
    """Return the user of the process at the other end. None if the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


class _Peer:
    """A process that calls."""

    def __init__(self, end: socket.socket, token: bytes, host: Host, peers: "set[_Peer]") -> None:
        self._token = token
        self._host = host
        self._peers = peers
        self._known = False
        self._kept: dict[int, list[Segment]] = {}
        """Shared memory that answers name, kept until their reader has it."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(end, self._received, self._ended, TOKEN_BYTES)

    def _received(self, frame: bytes) -> None:
        if not self._known:
            self._known = compare_digest(frame, self._token)
            if not self._known:
                self._ended()
                self._connection.close()
            self._connection.most = LONGEST
            return
        message = decode(frame)
        if isinstance(message, Acknowledgement):
            self._kept.pop(message.number, None)
        elif isinstance(message, Question):
            arguments, lost = None, None
            try:
                arguments = loaded(message.values)
            except BaseException as error:  # noqa: BLE001 -- a value's code may raise anything; the caller gets it
                lost = error
            if message.service == "cancel":
                self._host.cancel(*cast("tuple[str, int]", arguments))
            else:
                self._tasks[message.number] = self._loop.create_task(self._answer(message, arguments, lost))

    async def _answer(self, question: Question, arguments: object, lost: BaseException | None) -> None:
        segments: list[Segment] = []
        try:
            if question.call is not None:
                given = cast("Arguments", arguments) if question.values else NO_ARGUMENTS
                value = await self._host.call(question.call, given, lost)
            elif lost is not None:
                raise lost
            else:
                service = cast("Service", question.service)
                value = await self._host.serve(service, cast("tuple[object, ...]", arguments or ()))
            values, segments = await when_here(partial(dumped, value))
            self._connection.send(encode(Answer(question.number, values, leased=bool(segments))))
        except asyncio.CancelledError:  # the caller is gone
            raise
        except BaseException as error:  # noqa: BLE001 -- as above
            segments = []
            reason = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
            text = f"{reason}\n{''.join(traceback.format_exception(error))}"
            self._connection.send(encode(Answer(question.number, text.encode(errors="backslashreplace"), lost=True)))
        finally:
            del self._tasks[question.number]
        if segments:
            self._kept[question.number] = segments

    def _ended(self) -> None:
        if not self._known:
            log.warning("a process that does not know this run's secret is refused")
        self._peers.discard(self)
        self._kept.clear()
        for task in self._tasks.values():
            task.cancel()
