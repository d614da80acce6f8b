"""Environments of the library `verifiers`, which play in a separate process, by a separate Python.

The library pins packages that meshrl has in other versions, so it need not be installed where meshrl is. Its harness,
runtime, tools, judges and rewards are its own. The model that it asks is the gateway.
"""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import rmtree, which
from threading import Lock, Thread
from typing import Any, Final, cast
from weakref import finalize

from pydantic import Field, JsonValue

from meshrl.config import Config, validate
from meshrl.errors import ConfigError, DataError, Discard, MeshrlError, described, reports_no_space
from meshrl.supervisor import supervised

NAME: Final = "verifiers"
_WORKER: Final = Path(__file__).with_name("verifiers_worker.py")
_WAITING: Final = 4096
"""Connections that may wait."""
_LONGEST_PATH: Final = 103
"""Bytes of a socket's path at most, on macOS. Linux has room for four more."""
_BLOCKED: Final = 10.0
"""Seconds without an answer after which a process is taken to be blocked."""
_ENDS: Final = 30.0
"""Seconds that a process gets to end its episodes and their sandboxes."""


class VerifiersConfig(Config):
    """The keys of `options` for an environment of verifiers, in the task and in the agent."""

    python: str = ".venv-verifiers/bin/python"
    """The Python in which verifiers and the environment are installed."""
    size: int | None = Field(default=None, gt=0)
    """Tasks to read at most. By default all, of a taskset that has an end."""
    env: Mapping[str, JsonValue] = Field(default={})
    """The library's own table `env`, such as `env.taskset` and `env.agent.harness`."""


class EpisodeFailed(MeshrlError):
    """The library could not play or score an episode."""


class EpisodeLost(EpisodeFailed, Discard):
    """The environment's process ended, or its machine had no room, so the reward is unknown."""


def rows(taskset: str, options: Mapping[str, object], count: int | None) -> Iterator[dict[str, object]]:
    """Yield the taskset's tasks: texts `question`, `system` and `answer`, and `verifiers`, the whole task.

    ConfigError if the Python, the library or the environment is missing. DataError if the tasks cannot be read.
    """
    config, process = _read(taskset, options)
    try:
        most = min((each for each in (count, config.size) if each is not None), default=None)
        yield from cast("list[dict[str, object]]", process.ask({"rows": most}))
    except EpisodeFailed as error:
        raise DataError(f"{NAME}:{taskset}: its tasks cannot be read: {error}") from error


def load_agent(
    taskset: str, options: Mapping[str, object]
) -> Callable[[Any, Mapping[str, object]], Awaitable[Mapping[str, object]]]:
    """Return a function that plays a row, and returns its reward, those of its traces, and its numbers.

    ConfigError if the Python, the library or the environment is missing.
    """
    _, process = _read(taskset, options)

    async def solve(client: Any, row: Mapping[str, object]) -> Mapping[str, object]:
        task = row.get(NAME)
        if not isinstance(task, Mapping):
            raise DataError(f'the row has no {NAME!r}: set task.source = "{NAME}:{taskset}", as of the environment')
        request = {"url": str(client.base_url), "key": client.api_key, "model": "policy", "task": task}
        return cast("Mapping[str, object]", await process.play(request))

    return solve


def _read(taskset: str, options: Mapping[str, object]) -> "tuple[VerifiersConfig, _Process]":
    """Return the options, and the process of this environment, which the task and the agent share."""
    source = f"{NAME}:{taskset}"
    config = validate(VerifiersConfig, options, f"{source}: options")
    python = which(config.python)
    if python is None:
        venv = Path(config.python).parent.parent
        raise ConfigError(
            f"{source}: there is no Python {config.python!r} here. It is an environment of its own: python -m venv "
            f"{venv} && {config.python} -m pip install 'verifiers>=0.4', and the environment's package. Another one "
            "is named by options.python"
        )
    own = cast("Mapping[str, object]", config.env.get("taskset") or {})
    env = json.dumps({**config.env, "taskset": {**own, "id": taskset}})
    # Packages beside the script are found, as they are by `meshrl` itself. Servers of tools run in other folders.
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return config, _process(source, str(Path(python).absolute()), env, tuple(map(os.path.abspath, (".", *places))))


@cache
def _process(source: str, python: str, env: str, places: tuple[str, ...]) -> "_Process":
    return _Process(source, python, env, places)


class _Process:
    """The process of an environment, which is started again after its end. It ends with this one."""

    def __init__(self, source: str, python: str, env: str, places: tuple[str, ...]) -> None:
        """`places`: the folder in which it runs, and others with packages.

        Raises ConfigError if the environment cannot be loaded.
        """
        self._source, self._python, self._env, self._places = source, python, env, places
        self._starting = Lock()
        self._path = _new_path()
        self._started: list[subprocess.Popen[bytes]] = []
        finalize(self, _end, self._started, self._path)
        self._start()

    @property
    def _process(self) -> "subprocess.Popen[bytes]":
        return self._started[-1]

    def _start(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        Path(self._path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening, tempfile.TemporaryFile() as env:
            env.write(self._env.encode())  # others could read secrets on a command line
            env.seek(0)
            listening.bind(self._path)
            listening.listen(_WAITING)
            process = subprocess.Popen(  # noqa: S603 -- our own script, and a Python that the user names
                supervised([self._python, "-P", str(_WORKER), str(listening.fileno())]),
                pass_fds=[listening.fileno()],
                stdin=env,
                stdout=2,
                cwd=self._places[0],
                env=inherited | {"PYTHONPATH": os.pathsep.join(self._places)},
                start_new_session=True,
            )
        self._started[:] = [process]
        try:
            _exchange(self._path, _line({"rows": 0}))
        except (EpisodeFailed, OSError) as error:
            process.terminate()
            raise ConfigError(
                f"{self._source}: cannot be loaded by {self._python}: {error}. Packages are installed there "
                f"with {self._python} -m pip install"
            ) from error

    def _restart(self, ended: "subprocess.Popen[bytes]", error: OSError) -> None:
        """Start a process again that cannot be reached. Raises the error if it lives."""
        with self._starting:
            if self._process is ended:
                if ended.poll() is None and not isinstance(error, ConnectionRefusedError):  # somebody listens
                    raise error
                ended.wait()
                self._start()

    def ask(self, request: Mapping[str, object]) -> object:
        """Return the answer to a request. EpisodeFailed if it has none."""
        process = self._process
        try:
            return _exchange(self._path, _line(request))
        except OSError as error:
            self._restart(process, error)
            return _exchange(self._path, _line(request))

    async def play(self, request: Mapping[str, object]) -> object:
        """Return the outcome of an episode. It ends if this call is cancelled. EpisodeFailed if it failed."""
        process = self._process
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            await asyncio.to_thread(self._restart, process, error)
            reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(_line(request))
            return _value(await reader.read())
        except ConnectionError as error:
            raise EpisodeLost(f"its process has ended: {described(error)}") from error
        except (asyncio.CancelledError, GeneratorExit):
            Thread(target=_end_if_blocked, args=(process, self._path), daemon=True).start()
            raise
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _new_path() -> str:
    """Make a folder, and return the path of a socket in it, which must be short."""
    place = tempfile.gettempdir()
    is_long = len(os.fsencode(f"{place}/meshrl-12345678/socket")) > _LONGEST_PATH
    return f"{tempfile.mkdtemp(prefix='meshrl-', dir='/tmp' if is_long else place)}/socket"  # noqa: S108 -- mkdtemp is safe


def _exchange(path: str, line: bytes, seconds: float | None = None) -> object:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        connection.connect(path)
        connection.sendall(line)
        with connection.makefile("rb") as answer:
            return _value(answer.read())


def _end_if_blocked(process: "subprocess.Popen[bytes]", path: str) -> None:
    """End a process that answers nothing, such as one whose reward never returns. The next episode starts another."""
    try:
        _exchange(path, _line({"rows": 0}), _BLOCKED)
    except TimeoutError:
        process.terminate()
    except (EpisodeFailed, OSError):
        pass  # it has ended, or another one has begun


def _line(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, default=str).encode() + b"\n"


def _value(answer: bytes) -> object:
    if not answer:
        raise EpisodeLost("its process has ended")
    message = json.loads(answer)
    if "error" in message:
        raise (EpisodeLost if reports_no_space(message["error"]) else EpisodeFailed)(message["error"])
    return cast("object", message["value"])


def _end(started: "list[subprocess.Popen[bytes]]", path: str) -> None:
    """End the newest process. It ends its episodes first, whose sandboxes would stay otherwise."""
    for process in started:
        with suppress(EpisodeFailed, OSError, subprocess.TimeoutExpired):
            if process.poll() is None:
                _exchange(path, _line({"end": True}), _ENDS)
                process.wait(_ENDS)
        process.terminate()
        process.wait()
    rmtree(Path(path).parent, ignore_errors=True)
