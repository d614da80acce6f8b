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
from threading import Lock
from typing import Any, Final, cast
from weakref import finalize

from pydantic import Field, JsonValue

from meshrl.config import Config, validate
from meshrl.errors import ConfigError, DataError, MeshrlError, described
from meshrl.supervisor import supervised

NAME: Final = "verifiers"
_WORKER: Final = Path(__file__).with_name("verifiers_worker.py")
_WAITING: Final = 4096
"""Connections that may wait."""


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


def rows(taskset: str, options: Mapping[str, object], count: int | None) -> Iterator[dict[str, object]]:
    """Yield the taskset's tasks: texts `question`, `system` and `answer`, and `verifiers`, the whole task.

    ConfigError if the Python, the library or the environment is missing. DataError if the tasks cannot be read.
    """
    config, process = _read(taskset, options)
    try:
        yield from cast("list[dict[str, object]]", process.ask({"rows": count or config.size}))
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
    return config, _process(
        source, str(Path(python).absolute()), json.dumps({**config.env, "taskset": {**own, "id": taskset}})
    )


@cache
def _process(source: str, python: str, env: str) -> "_Process":
    return _Process(source, python, env)


class _Process:
    """The process of an environment, which is started again after its end. It ends with this one."""

    def __init__(self, source: str, python: str, env: str) -> None:
        """Raises ConfigError if the environment cannot be loaded."""
        self._source, self._python, self._env = source, python, env
        self._starting = Lock()
        self._start()

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="meshrl-")
        self._path = f"{folder}/socket"
        # Packages beside the script are found, as they are by `meshrl` itself, and by the servers of tools too.
        places = filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._path)
            listening.listen(_WAITING)
            self._process = subprocess.Popen(  # noqa: S603 -- our own script, and a Python that the user names
                supervised([self._python, "-P", str(_WORKER), str(listening.fileno()), self._env]),
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=inherited | {"PYTHONPATH": os.pathsep.join(places)},
                start_new_session=True,
            )
        finalize(self, _end, self._process, folder)
        try:
            self._exchange({"rows": 0})
        except (EpisodeFailed, OSError) as error:
            self._process.terminate()
            raise ConfigError(
                f"{self._source}: cannot be loaded by {self._python}: {error}. Packages are installed there "
                f"with {self._python} -m pip install"
            ) from error

    def _restart(self, ended: "subprocess.Popen[bytes]") -> None:
        with self._starting:
            if self._process is ended:
                ended.wait()
                self._start()

    def ask(self, request: Mapping[str, object]) -> object:
        """Return the answer to a request. EpisodeFailed if it has none."""
        process = self._process
        try:
            return self._exchange(request)
        except OSError:
            self._restart(process)
            return self._exchange(request)

    def _exchange(self, request: Mapping[str, object]) -> object:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._path)
            connection.sendall(_line(request))
            with connection.makefile("rb") as answer:
                return _value(answer.read())

    async def play(self, request: Mapping[str, object]) -> object:
        """Return the outcome of an episode. It ends if this call is cancelled. EpisodeFailed if it failed."""
        process = self._process
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            await asyncio.to_thread(self._restart, process)
            reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(_line(request))
            return _value(await reader.read())
        except ConnectionError as error:
            raise EpisodeFailed(f"its process has ended: {described(error)}") from error
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _line(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, default=str).encode() + b"\n"


def _value(answer: bytes) -> object:
    if not answer:
        raise EpisodeFailed("its process has ended")
    told = json.loads(answer)
    if "error" in told:
        raise EpisodeFailed(told["error"])
    return cast("object", told["value"])


def _end(process: "subprocess.Popen[bytes]", folder: str) -> None:
    process.terminate()
    process.wait()
    rmtree(folder, ignore_errors=True)
