"""The caller's end of a socket to another process of this machine."""

import asyncio
import socket
import traceback
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from meshrl.engines.hosting import Arguments, Ask, Broken, Channel, Gone, Reply, Service
from meshrl.engines.transport.connection import Connection
from meshrl.engines.transport.frames import Answer, Kind, Question, Taken, decode, dumped, encode, loaded

if TYPE_CHECKING:
    from meshrl.mesh import Segment

NEWS: Final = 1.0
"""Most seconds from the end of a connection to the report how the process ended. It takes milliseconds."""


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
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["SocketChannel"], tuple[Address]]:
        return SocketChannel, (self.address,)

    def call(self, ask: Ask, given: Arguments | None, *, stream: bool) -> Reply:
        """Send a call, or open a stream."""
        return self._connected().ask("stream" if stream else "call", ask, given)

    def request(self, service: Service, *arguments: object) -> Reply:
        """Ask for something else."""
        return self._connected().ask(service, None, arguments or None)

    def tell(self, service: Service, *arguments: object) -> None:
        """Send a request that needs no answer."""
        self._connected().tell(service, arguments)

    def close(self, reason: str = "its engine was closed") -> None:
        """Drop the process. Waiting tasks get `Gone` with the reason."""
        for line in list(self._lines.values()):
            line.close(reason)

    def _connected(self) -> "_Line":
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            line = self._lines[loop] = _Line(self.address, self.end)
        return line


class _Line:
    """The connection, on the loop that made it."""

    def __init__(self, address: Address, end: "asyncio.Future[str] | None") -> None:
        self._end = end
        self._asked = 0
        self._waiting: dict[int, tuple[Reply, list[Segment]]] = {}
        """The replies that are awaited, and the segments of each question that are kept until then."""
        self._gone = ""
        self._connection: Connection | None = None
        try:
            there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self._gone = f"it cannot be reached ({error.strerror or error})"
            return
        try:
            there.connect(address.path)
        except OSError as error:
            there.close()
            self._gone = f"nobody answers there ({error.strerror or error})"
            return
        self._connection = Connection(there, self._received, self._ended)
        self._connection.send(address.token)
        if end is not None:  # its forked children may hold the connection
            end.add_done_callback(self._heard)

    def ask(self, service: Kind, ask: Ask | None, arguments: object) -> Reply:
        """Send a question, and return its reply."""
        values, segments = dumped(arguments)
        number = self._asked
        self._asked += 1
        reply = Reply()
        if self._connection is None:
            reply.arrive(None, Gone(self._gone))
            return reply
        self._connection.send(encode(Question(number, service, ask, values)))
        self._waiting[number] = reply, segments
        return reply

    def tell(self, service: Service, arguments: object) -> None:
        """Send a message that needs no answer."""
        if self._connection is not None:
            values, _ = dumped(arguments)
            self._connection.send(encode(Question(-1, service, None, values)))

    def close(self, reason: str) -> None:
        """Drop the process. Waiting tasks get `Gone` with the reason."""
        if self._connection is not None:
            self._connection.close()
            self._fail(reason)

    def _received(self, frame: bytes) -> None:
        answer = decode(frame)
        if not isinstance(answer, Answer):
            return
        reply, _ = self._waiting.pop(answer.number)
        if answer.broken:
            reason, _, text = answer.value.decode().partition("\n")
            reply.arrive(None, Broken(reason, text))
            return
        value, error = None, None
        try:
            value = loaded(answer.value)
        except BaseException as failure:  # noqa: BLE001 -- a value's code may raise anything; the waiter gets it
            error = Broken("".join(traceback.format_exception_only(failure)).strip())
        reply.arrive(value, error)
        if answer.leased and self._connection is not None:
            self._connection.send(encode(Taken(answer.number)))

    def _ended(self) -> None:
        """The process is gone. Tell waiting tasks how it ended, if that is known in a moment."""
        self._connection = None
        self._gone = "it was killed, ran out of memory or crashed"
        if self._end is None or self._end.done():
            self._fail(self._end.result() if self._end else self._gone)
        else:
            asyncio.get_running_loop().call_later(NEWS, self._give_up, self._end)

    def _give_up(self, end: "asyncio.Future[str]") -> None:
        if not end.done():
            self._fail(self._gone)

    def _heard(self, end: "asyncio.Future[str]") -> None:
        if self._connection is not None:
            self._connection.close()
        self._fail(end.result())

    def _fail(self, reason: str) -> None:
        self._connection = None
        self._gone = reason
        waiting, self._waiting = self._waiting, {}
        for reply, _ in waiting.values():
            reply.arrive(None, Gone(reason))
