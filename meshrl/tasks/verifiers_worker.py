"""Plays an environment of verifiers in its own Python: `python -P verifiers_worker.py LISTENING ENV`.

`LISTENING` is an inherited Unix socket, and `ENV` the environment's configuration as JSON. Each connection brings one
request, a line of JSON, and gets one answer: rows, or the outcome of an episode. A client that leaves cancels its
episode. This script imports no meshrl, which need not be installed here.
"""

import asyncio
import json
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import count, islice
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

_OLDEST: Final = (0, 4)
_MOST: Final = 1 << 30
"""Bytes of a request at most."""

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
        self._numbers = count()
        self._up: asyncio.Future[None] | None = None

    async def answer(self, request: Json) -> object:
        """Answer a request: `{"rows": N}`, N or null for all, or `{"url", "key", "model", "task"}`."""
        return self._rows(request["rows"]) if "rows" in request else await self._play(request)

    def _rows(self, most: int | None) -> Sequence[Json]:
        taskset = self._env.taskset
        if most is None and not taskset.bounded:
            raise ValueError("its tasks have no end: set `size` in options, the number of tasks")
        return [_row(task.data) for task in islice(taskset, most)]

    async def _play(self, request: Json) -> Json:
        """Play an episode. The key is in a variable that harnesses do not inherit."""
        await self._serving()
        _reach(urlsplit(request["url"]).hostname or "")
        variable = f"MESHRL_API_KEY_{next(self._numbers)}"
        os.environ[variable] = request["key"]
        try:
            client = self._library.EvalClientConfig(base_url=request["url"], api_key_var=variable)
            data = self._task.data_type().model_validate(request["task"])
            (slot,) = self._env.slots(self._task(data, self._env.config.taskset.task))
            context = self._library.ModelContext(model=request["model"], client=client)
            episode = await self._env.run_slot(slot, context)
        finally:
            del os.environ[variable]
        if not self._env.complete(episode):
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise _Failed(f"{errors[-1].type}: {errors[-1].message}" if errors else "an episode has failed")
        return _outcome(episode.traces)

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
        except Exception as error:
            if up.done():
                raise
            up.set_exception(error)
            self._up = None  # the next episode tries again


class _Failed(Exception):
    """An episode failed. The message is all there is to tell."""


def _row(data: Any) -> Json:
    """The texts of a task for templates, and the whole task."""
    whole = data.model_dump(mode="json")
    return {
        "question": data.prompt_text or data.name or str(data.idx),
        "system": data.system_prompt or "",
        "answer": whole.get("answer", ""),
        "verifiers": whole,
    }


def _outcome(traces: Sequence[Any]) -> Json:
    """The mean reward, the reward of each trace, None if it is not to be learned, and the mean of each number."""
    rewards = {trace.id: trace.reward if trace.agent.trainable else None for trace in traces}
    learned = [trace for trace in traces if trace.agent.trainable]
    if not learned:
        raise _Failed("no trace of the episode is trainable")
    several = len({trace.agent.name for trace in learned}) > 1
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for trace in learned:
        scores = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None:
                numbers[f"{trace.agent.name}/{name}" if several else name].append(value)
    return {
        "reward": _mean([trace.reward for trace in learned]),
        "traces": rewards,
        "metrics": {name: _mean(values) for name, values in numbers.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _reach(host: str) -> None:
    """Reach a host without a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [each for each in os.environ.get(name, "").split(",") if each]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])


async def _connected(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request, unless its client leaves."""
    try:
        working = asyncio.create_task(worker.answer(json.loads(await reader.readline())))
        left = asyncio.create_task(reader.read())
        await asyncio.wait([working, left], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
        await asyncio.wait([working])
        left.cancel()
        if not working.cancelled():
            error = working.exception()
            writer.write(_told(error) if error else json.dumps({"value": working.result()}).encode())
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def _told(error: BaseException) -> bytes:
    return json.dumps({"error": str(error) if isinstance(error, _Failed) else _described(error)}).encode()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def main() -> None:
    """Load the environment, and answer until the process is ended. If it cannot be loaded, the first answer says so."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    try:
        worker = Worker(json.loads(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 -- a package of a user's may raise anything
        listening.setblocking(True)
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as request:
            request.readline()
            connection.sendall(_told(error))
        return

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _connected(worker, reader, writer)

    server = await asyncio.start_unix_server(connected, sock=listening, limit=_MOST)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
