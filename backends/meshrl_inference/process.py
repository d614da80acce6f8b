"""An engine's process as a sampler sees it: orders go to it, and answers to those who wait."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from getpass import getuser
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from typing import Final, TypeVar

import msgspec

import meshrl_inference
import meshrl_torch
from meshrl.errors import EngineDied, ModelError
from meshrl_inference.engine_side.protocol import Answer, Failed, Order, Ready, Start, encode, to_sampler

T = TypeVar("T")

_PATH: Final = 48
"""Most bytes of the path of temporary files, so that engines' socket paths stay within a system's 107."""
_GRACE: Final = 10.0
"""Seconds that it has to end by itself."""
_LINES: Final = 20
"""Lines of its output in an error."""
_LACKS: Final = re.compile(r"^  ModuleNotFoundError: (No module named '[\w.]+')\Z", re.MULTILINE)
"""Matches the last line of the output if the environment lacks a module."""


def new_folder(backend: str) -> tempfile.TemporaryDirectory[str]:
    """Make an engine's folder for its log and temporary files. It is removed with this object, whatever it contains."""
    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) <= _PATH else "/tmp"  # noqa: S108 -- a new name, with mode 700
    return tempfile.TemporaryDirectory(prefix=f"meshrl-{backend}-", dir=short, ignore_cleanup_errors=True)


def environment(folder: Path, backend: str) -> dict[str, str]:
    """Return this process's variables, with this folder for temporary files, and a Python path inside it.

    The path contains only this package, a backend's, and `meshrl_torch`, whose folder `wire` the process imports. It
    may use another Python with other packages.
    """
    paths = folder / "path"
    paths.mkdir()
    for package in (meshrl_torch, meshrl_inference, import_module(f"meshrl_{backend}")):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a user without a name
        user = getuser()
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{user}")  # torch's usual place, for later engines
    return {
        **os.environ,
        "PYTHONPATH": str(paths),
        "TMPDIR": str(folder),
        # Not first: torch sets it again, and a process whose first variable has moved cannot tell its title.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }


@dataclass(frozen=True)
class Kind:
    """The kind of an engine."""

    backend: str
    """The name of its backend, which is also that of its package."""
    title: str
    """Its name for people."""
    reads_broadcasts: bool = False
    """True if its processes read a policy's broadcast by themselves."""
    takes_adapters: bool = False
    """True if it decodes rows of several adapters, whose weights come alone."""
    sees: bool = False
    """True if it takes rows with images."""


class EngineConnection(ABC):
    """An engine, wherever it runs: it takes orders, and answers them."""

    tokens: int
    """Number of tokens that the model knows."""

    def __init__(self) -> None:
        self._end: ModelError | None = None
        """The error for all that wait, and for later orders."""
        self._on_answer: Callable[[Answer], None] = _ignore
        self._on_end: Callable[[ModelError], None] = _ignore
        self._receiver: asyncio.AbstractEventLoop | None = None
        """The loop that receives answers: the one that listened last."""
        self._missed: list[Callable[[], None]] = []
        """Calls for a closed loop, which the next one makes."""
        self._receiving = threading.Lock()

    @property
    def pid(self) -> int:
        """The engine's process. 0 if it is not on this machine."""
        return 0

    def listen(self, on_answer: Callable[[Answer], None], on_end: Callable[[ModelError], None]) -> None:
        """Call these methods in the running loop: `on_answer` with each answer, `on_end` at the engine's end.

        They do not keep their object alive, at whose end the engine ends.
        """
        if self._on_answer is _ignore:
            self._on_answer, self._on_end = _weak_callback(on_answer), _weak_callback(on_end)
        with self._receiving:
            self._receiver, missed, self._missed = asyncio.get_running_loop(), self._missed, []
        for each in missed:
            each()

    def _call_soon(self, call: Callable[[], None]) -> None:
        with self._receiving:
            try:
                if self._receiver is not None:
                    self._receiver.call_soon_threadsafe(call)
            except RuntimeError:  # it is closed
                self._missed.append(call)

    @abstractmethod
    def send(self, order: Order) -> None:
        """Send an order. Raises the error with which the engine has ended."""

    @abstractmethod
    def fail(self, error: ModelError) -> None:
        """End the engine with this error, for all that wait or send orders later."""

    @abstractmethod
    def close(self) -> None:
        """End the engine. Waiting tasks get an error."""


def _ignore(_: object) -> None:
    """Stands in for what nobody listens to yet."""


def _weak_callback(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls the method only while others keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(value: T) -> None:
        if (alive := reference()) is not None:
            alive(value)

    return call


class EngineProcess(EngineConnection):
    """An engine in its own process."""

    def __init__(self, kind: Kind, start: Start, python: str | None, seconds: float) -> None:
        """Raises EngineDied if it does not start within `seconds`."""
        super().__init__()
        self._title = kind.title
        self._advice = f"Set sampler.{kind.backend}.python to an interpreter of an environment that has {kind.title}"
        self._folder = new_folder(kind.backend)
        self._log = Path(self._folder.name, "log")
        self._connection, theirs = Pipe()
        command = [python or sys.executable, "-m", "meshrl_inference.engine_side.worker"]
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
        self._receiver_thread: threading.Thread | None = None
        try:
            ready = self._start(start, seconds)
        except BaseException:
            self.close()
            raise

        self.version: Final = ready.version
        """The version of the engine."""
        self.tokens = ready.tokens

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def listen(self, on_answer: Callable[[Answer], None], on_end: Callable[[ModelError], None]) -> None:
        """Call these methods in the running loop. They do not keep their object alive."""
        super().listen(on_answer, on_end)
        if self._receiver_thread is None:
            self._receiver_thread = threading.Thread(target=self._receive, name="meshrl-engine", daemon=True)
            self._receiver_thread.start()

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
            self._exit_code()
        self._connection.close()
        self._folder.cleanup()

    def _start(self, start: Start, seconds: float) -> Ready:
        """Start the engine. ModelError if its environment lacks a module."""
        try:
            self.send(start)
            if not self._connection.poll(seconds):
                raise self._ended(f"has not started in {seconds:g} s, which is start_timeout")
            answer = to_sampler.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            answer = Failed("")
        if isinstance(answer, Ready):
            return answer
        error = self._ended(f"failed as it started: {answer.text}" if answer.text else "ended as it started")
        if lacks := _LACKS.search(str(error)):
            raise ModelError(f"{self._title}'s process cannot be started: {lacks[1]} there. {self._advice}")
        raise error

    def _exit_code(self) -> int:
        """Wait for the end of the process, and kill it after some time."""
        try:
            return self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _ended(self, why: str) -> ModelError:
        """Return the error for all that wait, and for later orders."""
        if self._end is None:
            code = self._exit_code()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            lines = self._log.read_text(errors="replace").splitlines()[-_LINES:]
            self._end = EngineDied(
                f"{self._title}'s process {self._process.pid} {why} ({how}): respawn the sampler, or mend what its "
                "last lines say:\n" + "\n".join(f"  {line}" for line in lines)
            )
        return self._end

    def _receive(self) -> None:
        why = "has died"
        try:
            while not isinstance(answer := to_sampler.decode(self._connection.recv_bytes()), Failed):
                self._call_soon(partial(self._on_answer, answer))
            why = f"has failed: {answer.text}"
        except (EOFError, OSError):
            pass
        except msgspec.MsgspecError as error:
            why = f"has sent what cannot be read: {error}"
        self._call_soon(lambda: self._on_end(self._ended(why)))
