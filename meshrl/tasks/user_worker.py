"""The inside of a process that runs a user's code. See `user_process.py`.

The code has the main thread to itself, so signals, `asyncio.run` and what belongs to one thread work as in a script.
Plain functions run one after the other, while no event loop runs, or each in a copy of the process. Async ones share a
loop, which lives as long as the process and continues between plain calls.
"""

import asyncio
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np

from meshrl.errors import Discard, MachineFault, described, is_discarded, is_of_machine, unset_variable
from meshrl.supervisor import adopt, end_all
from meshrl.user_code import RAISED, find_copies, place_of

State: TypeAlias = Literal["runs", "waits", "value", "error"]
"""What becomes of a call: its function runs, its awaitable is waited for, or it has ended."""
Raised: TypeAlias = tuple[BaseException | None, str, str, str]
"""An exception if other processes know its class, its class's name, its text, and its place in the user's code."""
LENGTH: Final = struct.Struct("!i")
"""The length that precedes a message."""
AT_ONCE: Final = 1 << 18
"""Bytes that are received at most at once."""
_KNOWN: Final = frozenset({"asyncio", "builtins", "meshrl"})
"""Packages whose exceptions are known to other processes."""


class TookTooLong(Exception):
    """Raised for a call that took longer than it may."""


class Load(NamedTuple):
    """The code to load, and what it finds around it."""

    make: bytes
    """A pickled function, which returns the object whose methods will be called."""
    paths: Sequence[str]
    copies: Mapping[Path, Path]
    seconds: float | None
    """The limit of each call."""


class Call(NamedTuple):
    """A call of a method."""

    number: int
    method: str
    arguments: tuple[object, ...]
    check: Callable[[object], object]
    """Makes what is sent of what the method returns, or of what its awaitable gives."""
    alone: bool
    """True to call it in a copy of the process, which ends with the call."""


def main() -> NoReturn:
    """Load the code, and run calls until the process that started this one is gone."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread of the other process may have blocked some
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A killed process would lose buffered text. Its locale may lack characters of rows.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    connection = Connection(int(sys.argv[1]))
    code = cast("Load", connection.recv())
    sys.path[:] = code.paths
    find_copies(code.copies)
    try:
        made: object = pickle.loads(code.make)()  # noqa: S301 -- from our own process
    except BaseException as error:  # noqa: BLE001 -- a user's module may raise anything
        connection.send(raised(error))
        os._exit(1)
    connection.send(None)
    Runner(socket.socket(fileno=os.dup(connection.fileno())), made, code.seconds).run()


def messages(received: bytearray) -> Iterator[bytes]:
    """Take whole messages from the beginning of what was received."""
    while len(received) >= LENGTH.size:
        until = LENGTH.size + cast("int", LENGTH.unpack_from(received)[0])
        if len(received) < until:
            return
        message = bytes(received[LENGTH.size : until])
        del received[:until]
        yield message


def how_it_ended(code: int) -> str:
    """Return a text that says how a process ended."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def raised(error: BaseException) -> Raised:
    """Return an exception as it is sent."""
    place, kind = place_of(error), MachineFault if is_of_machine(error) else Discard if is_discarded(error) else None
    if kind and type(error) is not kind:
        error = kind(described(error))  # its class and its causes may not be known to other processes
    name, _, text = described(error).partition(": ")
    as_text = isinstance(error, StopIteration) or unset_variable(error)  # no future holds it; this needs its traceback
    known = type(error).__module__.partition(".")[0] in _KNOWN and isinstance(error, RAISED) and not as_text
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001 -- it may hold anything
        known = False
    return error if known else None, name, text, place


def _end(child: int) -> str:
    """End a copy with all that it has started. Returns how it ended."""
    end_all(child)
    try:
        return how_it_ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    except ChildProcessError:
        return "ended, and the user's code has waited for it"


async def _limited(value: Awaitable[object], seconds: float | None) -> object:
    work = asyncio.ensure_future(value)
    try:
        await asyncio.wait([work], timeout=seconds)
        if not work.done():
            raise TookTooLong
        return work.result()
    finally:
        work.cancel()


class Runner:
    """Runs the calls that arrive."""

    def __init__(self, connection: socket.socket, made: object, seconds: float | None) -> None:
        self._socket = connection
        self._received = bytearray()
        self._made = made
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        self._calls: deque[bytes] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self) -> NoReturn:
        """Run calls until the other process is gone."""
        self._loop.add_reader(self._socket, self._read)
        while True:
            if not self._calls or asyncio.all_tasks(self._loop):
                if self._calls:
                    self._loop.call_soon(self._loop.stop)  # one turn, in which async calls continue
                with suppress(BaseException):  # a task's SystemExit, which is raised where the task is awaited
                    self._loop.run_forever()
            if self._calls:
                self._start(self._calls.popleft())

    def _read(self) -> None:
        received = b""
        with suppress(OSError):
            received = self._socket.recv(AT_ONCE)
        if not received:
            os._exit(0)
        self._received += received
        self._calls += messages(self._received)
        self._loop.stop()

    def _start(self, message: bytes) -> None:
        number, wanted = cast("tuple[int, bytes | None]", pickle.loads(message))  # noqa: S301 -- from our own process
        if wanted is None:
            if task := self._tasks.get(number):
                task.cancel()
            return
        self._say("runs", number)
        began = time.monotonic()
        try:
            call = Call(number, *pickle.loads(wanted))  # noqa: S301
            if call.alone:
                self._tasks[number] = self._loop.create_task(self._relay(number, *self._copy(call)))
                self._say("waits", number)
                return
            value: object = getattr(self._made, call.method)(*call.arguments)
            if inspect.isawaitable(value):
                self._tasks[number] = self._loop.create_task(self._wait(call, value))
                self._say("waits", number)
                return
            value = call.check(value)
            if self._seconds is not None and time.monotonic() - began > self._seconds:
                raise TookTooLong
        except BaseException as error:  # noqa: BLE001 -- a user's function may raise anything
            self._say("error", number, raised(error))
        else:
            self._say("value", number, value)

    async def _wait(self, call: Call, value: Awaitable[object]) -> None:
        try:
            outcome = call.check(await (value if self._seconds is None else _limited(value, self._seconds)))
        except BaseException as error:  # noqa: BLE001 -- as above
            self._say("error", call.number, raised(error))
        else:
            self._say("value", call.number, outcome)
        finally:
            del self._tasks[call.number]

    def _copy(self, call: Call) -> tuple[int, int]:
        """Start a copy of this process that makes the call. Returns its id, and the pipe of its messages."""
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
            return child, read
        os.setsid()
        adopt()
        np.random.seed()  # noqa: NPY002 -- Python's own generator does so by itself
        try:
            value: object = getattr(self._made, call.method)(*call.arguments)
            value = asyncio.run(_limited(value, self._seconds)) if inspect.isawaitable(value) else value
            answer = self._message("value", call.number, call.check(value))
        except BaseException as error:  # noqa: BLE001 -- as above
            answer = self._message("error", call.number, raised(error))
        with suppress(Exception):
            sys.stdout.flush()
        with os.fdopen(write, "wb") as pipe, suppress(OSError):  # what has answered is ended
            pipe.write(LENGTH.pack(len(answer)) + answer)
        os._exit(0)

    async def _relay(self, number: int, child: int, pipe: int) -> None:
        """Say what a copy says, and end it with all that it has started."""
        reader, answer = asyncio.StreamReader(), None
        try:
            transport, _ = await self._loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
            )
            with closing(transport), suppress(asyncio.IncompleteReadError):
                async with asyncio.timeout(self._seconds):
                    answer = await reader.readexactly(*LENGTH.unpack(await reader.readexactly(LENGTH.size)))
        except TimeoutError:
            answer = self._message("error", number, raised(TookTooLong()))
        finally:
            ended = _end(child)
            del self._tasks[number]
        if answer is None:
            answer = self._message("error", number, raised(RuntimeError(f"its process {ended}")))
        self._send(answer)

    def _say(self, state: State, number: int, content: object = None) -> None:
        self._send(self._message(state, number, content))

    @staticmethod
    def _message(state: State, number: int, content: object) -> bytes:
        try:
            pickled = pickle.dumps(content)
        except Exception as error:  # noqa: BLE001 -- the function may return anything
            state, pickled = "error", pickle.dumps(raised(TypeError(f"its result cannot be pickled: {error}")))
        return pickle.dumps((state, number, pickled))

    def _send(self, message: bytes) -> None:
        """Send at once: what runs next may end the process."""
        try:
            self._socket.sendall(LENGTH.pack(len(message)) + message)
        except OSError:
            os._exit(0)
