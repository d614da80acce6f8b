"""The engine's process as a sampler sees it: sends orders, and passes answers on to those who wait."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from meshrl.errors import EngineDied, ModelError
from meshrl_inference.environment import environment, new_folder
from meshrl_inference.messages import Answer, Failed, Order, Ready, Start, encode, to_sampler

T = TypeVar("T")

_PATIENCE: Final = 600.0
"""Seconds that an engine has to start."""
_GRACE: Final = 10.0
"""Seconds that it has to end by itself."""
_LINES: Final = 20
"""Lines of its output in an error."""
_LACKS: Final = re.compile(r"^  ModuleNotFoundError: (No module named '[\w.]+')\Z", re.MULTILINE)
"""Matches the last line of the output if the environment lacks a module."""


@dataclass(frozen=True)
class Kind:
    """The kind of an engine."""

    backend: str
    """The name of its backend, which is also that of its package."""
    title: str
    """Its name for people."""
    joins: bool = False
    """True if its processes read a policy's broadcast by themselves."""


class Orders(Protocol):
    """An engine as a sampler sees it, anywhere: it takes orders, and answers them."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the model knows."""
        ...

    @property
    def pid(self) -> int:
        """The engine's process. 0 if it is not on this machine."""
        ...

    def listen(self, heard: Callable[[Answer], None], ended: Callable[[ModelError], None]) -> None:
        """Call these functions in the running loop: `heard` with each answer, `ended` at the engine's end.

        They do not keep their object alive, at whose end the engine ends.
        """
        ...

    def send(self, order: Order) -> None:
        """Send an order. Raises the error with which the engine has ended."""
        ...

    def fail(self, error: ModelError) -> None:
        """End the engine with this error, for all that wait or send orders later."""
        ...

    def close(self) -> None:
        """End the engine. Waiting tasks get an error."""
        ...


class EngineProcess:
    """An engine in its own process: `Orders`."""

    def __init__(self, kind: Kind, start: Start, python: str | None) -> None:
        """Raises EngineDied if it does not start."""
        self._title = kind.title
        self._advice = f"Set sampler.{kind.backend}.python to an interpreter of an environment that has {kind.title}"
        self._folder = new_folder(kind.backend)
        self._log = Path(self._folder.name, "log")
        self._connection, theirs = Pipe()
        command = [python or sys.executable, "-m", "meshrl_inference.worker"]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 -- the interpreter that the configuration names
                    [*command, f"meshrl_{kind.backend}.engine", str(theirs.fileno()), self._folder.name],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # it ends by itself after this process, in order
                    env=environment(Path(self._folder.name), kind.backend),
                )
        except OSError as error:
            self._folder.cleanup()
            raise ModelError(f"{kind.title}'s process cannot be started: {error}. {self._advice}") from error
        theirs.close()
        self._sending = threading.Lock()
        self._listener: threading.Thread | None = None
        self._loop = Listener()
        self._end: ModelError | None = None
        try:
            ready = self._started(start)
        except BaseException:
            self.close()
            raise

        self.version: Final = ready.version
        """The version of the engine."""
        self.tokens: Final = ready.tokens
        """Number of tokens that the model knows."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def listen(self, heard: Callable[[Answer], None], ended: Callable[[ModelError], None]) -> None:
        """Call these functions in the running loop: `heard` with each answer, `ended` at the process's end.

        They do not keep their object alive, at whose end the process ends.
        """
        self._loop.become(asyncio.get_running_loop())
        if self._listener is None:
            hear, end = while_it_lives(heard), while_it_lives(ended)
            arguments = (self._connection, self._loop, hear, lambda why: end(self._ended(why)))
            self._listener = threading.Thread(target=_listen, args=arguments, name="meshrl-engine", daemon=True)
            self._listener.start()

    def send(self, order: Start | Order) -> None:
        """Send an order. Raises EngineDied if the process has ended."""
        if self._end is not None:
            raise self._end
        with self._sending:
            try:
                self._connection.send_bytes(encode(order))
            except OSError:
                raise self._ended("has ended") from None

    def fail(self, error: ModelError) -> None:
        """End the process with this error, for all that wait or send orders later."""
        self._end = self._end or error
        self._process.kill()

    def close(self) -> None:
        """End the process. Waiting tasks get an error."""
        self._end = self._end or ModelError(f"{self._title}'s process {self._process.pid} was stopped with its sampler")
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection.close()
        self._folder.cleanup()

    def _started(self, start: Start) -> Ready:
        """Start the engine. ModelError if its environment lacks a module."""
        try:
            self.send(start)
            if not self._connection.poll(_PATIENCE):
                raise self._ended(f"has not started in {_PATIENCE:.0f} seconds")
            answer = to_sampler.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            answer = Failed("")
        if isinstance(answer, Ready):
            return answer
        error = self._ended(f"failed as it started: {answer.text}" if answer.text else "ended as it started")
        if lacks := _LACKS.search(str(error)):
            raise ModelError(f"{self._title}'s process cannot be started: {lacks[1]} there. {self._advice}")
        raise error

    def _ended(self, why: str) -> ModelError:
        """Return the error for all that wait, and for later orders."""
        if self._end is None:
            try:
                code = self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            lines = self._log.read_text(errors="replace").splitlines()[-_LINES:]
            self._end = EngineDied(
                f"{self._title}'s process {self._process.pid} {why} ({how}): respawn the sampler, or mend what its "
                "last lines say:\n" + "\n".join(f"  {line}" for line in lines)
            )
        return self._end


class Listener:
    """The loop that receives answers: the one that asked last. Answers to a closed loop go to the next one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._missed: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def become(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the running loop as the receiver."""
        with self._lock:
            self._loop, missed, self._missed = loop, self._missed, []
        for each in missed:
            each()

    def soon(self, call: Callable[[], None]) -> None:
        """Call a function in that loop."""
        with self._lock:
            try:
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(call)
            except RuntimeError:  # it is closed
                self._missed.append(call)


def while_it_lives(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls the method only while others keep its object alive."""
    found = weakref.WeakMethod(method)

    def call(value: T) -> None:
        if (alive := found()) is not None:
            alive(value)

    return call


def _listen(
    connection: Connection, loop: Listener, heard: Callable[[Answer], None], ended: Callable[[str], None]
) -> None:
    """Receive messages until the process ends."""
    why = "has died"
    try:
        while not isinstance(answer := to_sampler.decode(connection.recv_bytes()), Failed):
            loop.soon(partial(heard, answer))
        why = f"has failed: {answer.text}"
    except (EOFError, OSError):
        pass
    except msgspec.MsgspecError as error:
        why = f"has sent what cannot be read: {error}"
    loop.soon(partial(ended, why))
