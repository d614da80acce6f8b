"""Calls through a socket to a process of this machine: the caller's end, and the rank's, which answers for a `Host`."""

import asyncio
import errno
import os
import socket
import struct
import traceback
from collections.abc import Callable
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from meshrl import log
from meshrl.engines.remote.connection import (
    LONGEST,
    TOKEN_BYTES,
    Answer,
    Connection,
    Question,
    Taken,
    decode,
    dumped,
    encode,
    leave_to_parent,
    loaded,
)
from meshrl.engines.remote.host import Host
from meshrl.engines.remote.messages import (
    NO_ARGUMENTS,
    Arguments,
    Call,
    Channel,
    MessageLost,
    ProcessExited,
    Reply,
    Service,
)
from meshrl.mesh import when_here

if TYPE_CHECKING:
    from meshrl.mesh import Segment

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
        self._asked = 0
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
            return Reply(ProcessExited(self._exit_reason))
        number = self._asked
        self._asked += 1
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
            self._connection.send(encode(Taken(answer.number)))

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
        if isinstance(message, Question):
            self._answer_soon(message)
        elif isinstance(message, Taken):
            self._kept.pop(message.number, None)

    def _answer_soon(self, question: Question) -> None:
        arguments, lost = None, None
        try:
            arguments = loaded(question.values)
        except BaseException as error:  # noqa: BLE001 -- a value's code may raise anything; the caller gets it
            lost = error
        if question.service == "cancel":
            self._host.cancel(*cast("tuple[str, int]", arguments))
            return
        self._tasks[question.number] = self._loop.create_task(self._answer(question, arguments, lost))

    async def _answer(self, question: Question, arguments: object, lost: BaseException | None) -> None:
        try:
            value = await self._work(question, arguments, lost)
            values, segments = await when_here(partial(dumped, value))
            self._connection.send(encode(Answer(question.number, values, leased=bool(segments))))
        except asyncio.CancelledError:  # the caller is gone
            raise
        except BaseException as error:  # noqa: BLE001 -- as above
            self._connection.send(_lost(question, error))
            return
        finally:
            del self._tasks[question.number]
        if segments:
            self._kept[question.number] = segments

    async def _work(self, question: Question, arguments: object, lost: BaseException | None) -> object:
        if question.call is not None:
            given = cast("Arguments", arguments) if question.values else NO_ARGUMENTS
            return await self._host.call(question.call, given, lost)
        if lost is not None:
            raise lost
        service = cast("Service", question.service)
        return await self._host.serve(service, cast("tuple[object, ...]", arguments or ()))

    def _ended(self) -> None:
        if not self._known:
            log.warning("a process that does not know this run's secret is refused")
        self._peers.discard(self)
        self._kept.clear()
        for task in self._tasks.values():
            task.cancel()


def _lost(question: Question, error: BaseException) -> bytes:
    """Answer a question that was lost."""
    reason = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    text = f"{reason}\n{''.join(traceback.format_exception(error))}"
    return encode(Answer(question.number, text.encode(errors="backslashreplace"), lost=True))
