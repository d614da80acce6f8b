"""A process that runs a user's code on its main thread, and is ended if a call takes too long.

So the code works the same on every engine, whose ranks may be threads, and it cannot hold up or end a rank. What it has
started ends with its process, and that ends with the one that needs it.
"""

import asyncio
import inspect
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from threading import Lock
from typing import Final, Literal, TypeAlias, TypeVar, cast
from weakref import finalize, ref

from meshrl.errors import described
from meshrl.supervisor import supervised
from meshrl.tasks.user_worker import AT_ONCE, LENGTH, Load, Raised, State, TookTooLong, how_it_ended, messages
from meshrl.user_code import copies_here, pickled, set_place

T = TypeVar("T")
_START: Final = "import sys; sys.path[:] = sys.argv[2:]; from meshrl.tasks.user_worker import main; main()"
_ENDS: Final = 5.0
"""Seconds that a plain call may still run after it was cancelled. Then its process is ended."""
_GRACE: Final = 0.25
"""Seconds that a process gets to say itself that a call took too long."""


Guilt: TypeAlias = Literal["none", "possible", "certain"]
"""Whether a call ended its process."""


class ProcessEnded(Exception):
    """Raised for a call whose process has ended, with its part in that. `possible`: it waited, as others did."""

    def __init__(self, reason: str, guilt: Guilt = "certain") -> None:
        super().__init__(reason)
        self.guilt = guilt


def has_processes() -> bool:
    """True if the running event loop can reach another process. False in virtual time."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return True
    return type(loop).remove_reader is not asyncio.AbstractEventLoop.remove_reader


class UserProcess:
    """A process that has loaded a user's code, and runs its calls for one event loop."""

    def __init__(self, make: bytes, seconds: float | None = None) -> None:
        """`make`: a pickled function that returns the object to call. `seconds`: the limit of a call.

        Raises what loading raises.
        """
        self.ended: str | None = None
        """Why the process has ended. None while it runs."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 -- our own module
                supervised([sys.executable, "-c", _START, str(theirs.fileno()), *sys.path]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._process, self._socket = process, ours
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._kill = finalize(self, _end, process, ours, self._loops)
        connection = Connection(os.dup(ours.fileno()))
        try:
            connection.send(Load(make, sys.path, copies_here(), seconds))
            failed = cast("Raised | None", connection.recv())
        except (EOFError, OSError) as error:
            raise ProcessEnded(f"its process {self._stop()} while it loaded the code") from error
        finally:
            connection.close()
        if failed is not None:
            self._stop()
            raise _error_of(failed)
        ours.setblocking(False)
        self._seconds = seconds
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._begun: set[int] = set()
        self._running: int | None = None
        self._received, self._unsent = bytearray(), bytearray()
        self._last_message_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, method: str, *arguments: object, check: Callable[[object], T], alone: bool = False) -> T:
        """Call a method of the object, and return what `check`, a function of a module, makes of its result there.

        `alone`: it runs in a copy of the process, so that other calls do not wait, and the copy ends with it.
        Raises what it raises, ProcessEnded, or TookTooLong, for which the process is ended if it does not answer.
        """
        if self.ended is not None:
            raise ProcessEnded(self.ended, "none")
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):  # of an earlier `asyncio.run`
            raise ProcessEnded(self._stop(), "none")
        if self._loop is None:
            self._loop = loop
            self._loops.append(loop)
            loop.add_reader(self._socket, _reader(self, self._socket, loop))
        number, future = next(self._numbers), loop.create_future()
        wanted = pickled((method, arguments, check, alone))
        if not self._calls:
            self._last_message_at = loop.time()
        self._calls[number] = future
        self._send(number, wanted)
        if self._seconds is not None and self._timer is None:
            self._timer = loop.call_later(self._seconds + _GRACE, self._check_time)
        try:
            return cast("T", await future)
        finally:
            if self._calls.pop(number, None) is not None:  # it was cancelled
                self._send(number, None)
                if number == self._running:  # and holds up the others
                    loop.call_later(_ENDS, self._end_if_running, number)

    def _end_if_running(self, number: int) -> None:
        if self.ended is None and number == self._running:
            self.end()

    def end(self) -> None:
        """End the process. Calls in progress raise ProcessEnded."""
        self._fail(ProcessEnded(f"its process {self._stop()}"))

    def _send(self, number: int, wanted: bytes | None) -> None:
        message = pickle.dumps((number, wanted))
        if not self._unsent and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._write)  # with what else is sent in this turn
        self._unsent += LENGTH.pack(len(message)) + message

    def _write(self) -> None:
        if self._loop is None or self.ended is not None:
            return
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # reading tells of an end
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        if self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def read(self) -> None:
        """Read what the process has sent."""
        try:
            received = self._socket.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.end()
            return
        self._received += received
        if self._loop is not None:
            self._last_message_at = self._loop.time()
        for message in messages(self._received):
            self._receive(*cast("tuple[State, int, bytes]", pickle.loads(message)))  # noqa: S301 -- from our own process

    def _receive(self, state: State, number: int, pickled: bytes) -> None:
        if state == "runs":
            self._running = number
            self._begun.add(number)
            return
        if self._running == number:
            self._running = None
        if state == "waits":
            return
        self._begun.discard(number)
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        try:
            content: object = pickle.loads(pickled)  # noqa: S301 -- as above
        except Exception as error:  # noqa: BLE001 -- of a class that only the other process has loaded
            future.set_exception(TypeError(f"its result, or its error, cannot be unpickled here: {described(error)}"))
            return
        if state == "value":
            future.set_result(content)
        else:
            future.set_exception(_error_of(cast("Raised", content)))

    def _check_time(self) -> None:
        """End the process if it has said nothing for longer than a call may take."""
        self._timer = None
        if self._loop is None or self._seconds is None or not self._calls:
            return
        left = self._last_message_at + self._seconds + _GRACE - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_time)
        else:
            self._stop()
            self._fail(TookTooLong())

    def _stop(self) -> str:
        """End the process, and say how it ended."""
        if self._kill.alive and self._kill.peek() is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)  # it may be ending by itself
            self._kill()
        self.ended = how_it_ended(self._process.returncode)
        return self.ended

    def _fail(self, error: Exception) -> None:
        """Fail all calls: the one that ran, or alone waited, with the error. Of several that waited each is suspect."""
        calls, self._calls = self._calls, {}
        suspects = self._begun if self._running is None else {self._running}
        others: Guilt = "possible" if len(suspects) > 1 else "certain"
        for number, future in calls.items():
            if not future.done():
                guilt = others if number in suspects else "none"
                future.set_exception(error if guilt == "certain" else ProcessEnded(f"its process {self.ended}", guilt))


def _end(process: "subprocess.Popen[bytes]", ours: socket.socket, loops: list[asyncio.AbstractEventLoop]) -> None:
    process.terminate()
    process.wait()
    for loop in loops:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(_close, ours, loop)
            return
    ours.close()


def _close(ours: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    if ours.fileno() >= 0:
        loop.remove_reader(ours)
        loop.remove_writer(ours)
        ours.close()


def _reader(process: UserProcess, ours: socket.socket, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Return what reads for a process. The loop does not keep the process alive."""
    alive = ref(process)

    def read() -> None:
        if (found := alive()) is not None:
            found.read()
        else:
            _close(ours, loop)

    return read


def _error_of(raised: Raised) -> BaseException:
    known, name, text, place = raised
    error = known if known is not None else cast("Exception", type(name, (Exception,), {})(text))
    set_place(error, place)
    return error


class UserCode:
    """A user's code in a process, which is started again after its end."""

    def __init__(self, make: Callable[[], object], seconds: float | None = None, limit: str = "") -> None:
        """`make` and `seconds`, the limit of a call: see `UserProcess`. `limit`: the key that sets it, for messages.

        Raises an exception of any kind if `make` cannot be pickled.
        """
        self._start = partial(UserProcess, pickled(make), seconds)
        self._process = self._start()
        self._starting = Lock()
        self._limit = f"{limit} = {seconds or 0:g}"
        self._suspects = 0
        """Calls that may have ended a process, and are repeated one after the other, while the others wait."""
        self._turn = asyncio.Lock()

    async def call(self, method: str, *arguments: object, check: Callable[[object], T], alone: bool = False) -> T:
        """As `UserProcess.call`, with TimeoutError for a call that took too long.

        It is repeated if another call ended their process: while no other runs if it may have been this one.
        """
        suspected = False
        while True:
            try:
                async with self._by_itself() if suspected else nullcontext():
                    await self._ready(suspected)
                    return await self._process.call(method, *arguments, check=check, alone=alone)
            except TookTooLong as error:
                raise TimeoutError(self._limit) from error
            except ProcessEnded as ended:
                if ended.guilt == "certain" or (ended.guilt == "possible" and alone):
                    raise
                suspected = suspected or ended.guilt == "possible"

    @asynccontextmanager
    async def _by_itself(self) -> AsyncGenerator[None]:
        if not self._suspects:
            self._turn = asyncio.Lock()  # of this event loop
        self._suspects += 1
        try:
            async with self._turn:
                yield
        finally:
            self._suspects -= 1

    async def _ready(self, suspected: bool) -> None:
        """Wait until a process runs, and for the suspects if this call is none."""
        while self._process.ended is not None or (self._suspects and not suspected):
            if self._process.ended is not None:
                await asyncio.to_thread(self._restart)  # loading may take long
            else:
                async with self._turn:
                    pass

    def _restart(self) -> None:
        with self._starting:
            if self._process.ended is not None:
                self._process = self._start()


class CodeHere:
    """Code in this process: what calls no library, and a user's in virtual time."""

    def __init__(self, make: Callable[[], object]) -> None:
        """`make` returns the object to call."""
        self._made = make()

    async def call(self, method: str, *arguments: object, check: Callable[[object], T], alone: bool = False) -> T:
        """Return what `check` makes of the result."""
        result: object = getattr(self._made, method)(*arguments)
        return check(await result if inspect.isawaitable(result) else result)
