"""Plays an environment of verifiers in its own Python: `python -P verifiers_worker.py LISTENING`.

`LISTENING` is an inherited Unix socket, and the input the environment's configuration as JSON. Each connection brings
one request, a line of JSON, and gets one answer: rows, or the outcome of an episode. A client that leaves cancels its
episode. This script imports no meshrl, which need not be installed here.
"""

import asyncio
import json
import math
import os
import socket
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from importlib import import_module
from itertools import count, islice
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

_OLDEST: Final = (0, 4)
_MOST: Final = 1 << 30
"""Bytes of a request at most."""
_KEY: Final = "MESHRL_API_KEY_"
"""The beginning of a variable with an episode's key."""

Json: TypeAlias = dict[str, Any]


class Worker:
    """An environment and its episodes."""

    def __init__(self, env: Mapping[str, object]) -> None:
        """Load the environment. Raises an exception of any kind if it cannot be loaded."""
        version = str(import_module("verifiers").__version__)
        if tuple(map(int, version.split(".")[:2])) < _OLDEST:
            raise ImportError(f"verifiers is {version} here, and environments of 0.4 and later are played")
        self._library: Any = import_module("verifiers.v1")
        self._env: Any = self._library.load_environment(self._library.resolve_env_config(dict(env)))
        self._task: Any = type(self._env.taskset).task_type()
        data = self._task.data_type()
        if excluded := [name for name, field in data.model_fields.items() if field.exclude]:
            raise ValueError(
                f"{data.__name__} excludes {', '.join(excluded)} from serialisation, and an episode gets its task as "
                "JSON: drop exclude=True"
            )
        self._seats = [*import_module("verifiers.v1.configs.agent").agent_config_fields(self._env.config)]
        self._turn: AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if _shares_folders(self._env, self._task) else nullcontext()
        )
        _share_connections()
        self._numbers = count()
        self.ended: asyncio.Event = asyncio.Event()
        """Set after the request to end."""
        self._holding: asyncio.Task[None] | None = None
        self._episodes: set[asyncio.Task[Json]] = set()
        self._up: asyncio.Future[None] | None = None

    async def answer(self, request: Json) -> object:
        """Answer a request: `{"rows": N}`, N or null for all, `{"url", "key", "model", "task"}`, or `{"end": true}`."""
        if "rows" in request:
            return self._rows(request["rows"])
        if "end" in request:
            await self._end()
            return None
        episode = asyncio.create_task(self._play(request))
        self._episodes.add(episode)
        episode.add_done_callback(self._episodes.discard)
        return await episode

    async def _end(self) -> None:
        """Cancel the episodes, which remove their boxes, and end what they share."""
        groups: list[set[asyncio.Task[Any]]] = [{*self._episodes}, {self._holding} if self._holding else set()]
        for tasks in groups:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.ended.set()

    def _rows(self, most: int | None) -> Sequence[Json]:
        taskset = self._env.taskset
        if most is None and not taskset.bounded:
            raise ValueError("its tasks have no end: set `size` in options, the number of tasks")
        return [_row(task.data) for task in islice(taskset, most)]

    async def _play(self, request: Json) -> Json:
        """Play an episode. The key is in a variable that harnesses do not inherit."""
        await self._serving()
        _bypass_proxy(urlsplit(request["url"]).hostname or "")
        variable = f"{_KEY}{next(self._numbers)}"
        os.environ[variable] = request["key"]
        try:
            client = self._library.EvalClientConfig(base_url=request["url"], api_key_var=variable)
            data = self._task.data_type().model_validate(request["task"])
            (slot,) = self._env.slots(self._task(data, self._env.config.taskset.task))
            context = self._library.ModelContext(model=request["model"], client=client)
            async with self._turn:
                episode = await self._env.run_slot(slot, context)
        finally:
            del os.environ[variable]
        if not self._env.complete(episode):
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise _Failed(f"{errors[-1].type}: {errors[-1].message}" if errors else "an episode has failed")
        return _outcome(episode.traces, self._seats)

    async def _serving(self) -> None:
        """Wait until what episodes share is up: tools, and the library's own server before the model."""
        if self._up is None:
            self._up = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(self._up))
        await asyncio.shield(self._up)

    async def _hold(self, up: "asyncio.Future[None]") -> None:
        try:
            async with self._env.serving():
                up.set_result(None)
                await asyncio.Event().wait()
        except BaseException as error:  # noqa: BLE001 -- a package of a user's may raise anything
            self._up = None  # the next episode tries again
            if not up.done():
                up.set_exception(_Failed(_described(error)))
            elif not isinstance(error, asyncio.CancelledError):
                traceback.print_exception(error)


class _Failed(Exception):
    """An episode failed. The message is all there is to tell."""


def _shares_folders(env: Any, task: type) -> bool:
    """Whether all episodes are graded in the same folders: Harbor's have fixed paths, which containers set apart."""
    harbor: Any = sys.modules.get("verifiers.v1.tasksets.harbor")
    if harbor is None or not issubclass(task, harbor.HarborTask):
        return False
    fields = [getattr(env.config, name) for name in type(env.config).model_fields]
    if "subprocess" not in [runtime.type for each in fields if (runtime := getattr(each, "runtime", None))]:
        return False
    if not isinstance(env, harbor.HarborEnv):
        raise ValueError(
            f"{type(env).__name__} may grade several attempts at once in /tests and /logs of this machine: Harbor's "
            'tasks need a container, such as env.agent.runtime.type = "docker"'
        )
    return True


def _row(data: Any) -> Json:
    """The texts of a task for templates, and the whole task."""
    whole = data.model_dump(mode="json")
    return {
        "question": data.prompt_text or data.name or str(data.idx),
        "system": data.system_prompt or "",
        "answer": whole.get("answer", ""),
        "verifiers": whole,
    }


def _outcome(traces: Sequence[Any], seats: Sequence[str]) -> Json:
    """The mean reward, the reward of each trace, None if it is not to be learned, its seat, and means of numbers.

    A trace that failed or was not scored has no reward.
    """
    learned = [each for each in traces if each.agent.trainable and each.ok and None not in each.rewards.values()]
    if not learned:
        raise _Failed("no trace of the episode is trainable and scored")
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for trace in learned:
        scores = {name: reward.value for name, reward in trace.rewards.items()}
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None and math.isfinite(value):
                numbers[f"{trace.agent.name}/{name}" if len(seats) > 1 else name].append(value)
    rewards = {trace.id: trace.reward for trace in learned}
    return {
        "reward": _mean([*rewards.values()]),
        "traces": {trace.id: rewards.get(trace.id) for trace in traces},
        "seats": {trace.id: seats.index(trace.agent.name) for trace in traces},
        "metrics": {name: _mean(values) for name, values in numbers.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bypass_proxy(host: str) -> None:
    """Reach a host without a proxy. Earlier exceptions stay."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [each for each in map(str.strip, given.split(",")) if each]
    if host not in hosts:
        hosts.append(host)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(hosts)


def _share_connections() -> None:
    """Let all episodes ask the gateway by the same connections.

    The library keeps those of each endpoint and key to its own end, and each episode has a key.
    """
    names = ("interception.server", "clients", "clients.base")
    modules: list[Any] = [import_module(f"verifiers.v1.{name}") for name in names]
    server, clients, base = modules
    others = server.resolve_client

    @cache
    def connections(url: str) -> Any:
        return base.build_async_httpx(clients.EvalClientConfig(base_url=url))

    async def close() -> None:
        """Keep the connections, which others have too."""

    def resolve(config: Any) -> Any:
        if not config.api_key_var.startswith(_KEY):
            return others(config)
        client = object.__new__(clients.EvalClient)  # not its own connections
        client.base_url, client.headers, client.close = config.base_url, dict[str, str](), close
        client.api_key = os.environ[config.api_key_var]
        client.client = connections("//".join(urlsplit(config.base_url)[:2]))
        return client

    server.resolve_client = resolve


async def _connected(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request, unless its client leaves."""
    try:
        working = asyncio.create_task(_answer(worker, await reader.readline()))
        left = asyncio.create_task(reader.read())
        await asyncio.wait([working, left], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
        await asyncio.wait([working])
        left.cancel()
        if not working.cancelled():
            error = working.exception()
            writer.write(_error_line(error) if error else working.result())
            await writer.drain()
    except (ConnectionError, asyncio.CancelledError):  # it is cancelled at the end alone, and streams would log that
        pass
    finally:
        writer.close()


async def _answer(worker: Worker, request: bytes) -> bytes:
    return json.dumps({"value": await worker.answer(json.loads(request))}).encode()


def _error_line(error: BaseException) -> bytes:
    return json.dumps({"error": str(error) if isinstance(error, _Failed) else _described(error)}).encode()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def main() -> None:
    """Load the environment, and answer until one asks to end. If it cannot be loaded, the first answer says so."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    try:
        worker = Worker(json.load(sys.stdin.buffer))
    except Exception as error:  # noqa: BLE001 -- a package of a user's may raise anything
        listening.setblocking(True)
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as request:
            request.readline()
            connection.sendall(_error_line(error))
        return

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _connected(worker, reader, writer)

    server = await asyncio.start_unix_server(connected, sock=listening, limit=_MOST)
    await worker.ended.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
