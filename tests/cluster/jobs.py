"""Jobs: what tests of several hosts run on one of them, in a process of its own: `python -m tests.cluster.jobs`.

A job is a function that is given an engine of the cluster, and returns what JSON can hold.
"""

import asyncio
import ctypes
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import meshrl as rl
from meshrl.engines.ray import RayEngine
from meshrl.errors import MeshrlError, NoRoom
from meshrl.mesh import EVERY, Same
from tests.support.cluster import Cluster, Host

Job: TypeAlias = Callable[..., Awaitable[object]]
MIB = 1 << 20
ANSWER = "answer: "
"""Goes before what a job returns, among the lines that Ray writes."""
LOGS = Path("/tmp/meshrl-test-logs")  # noqa: S108 -- each host's own


def started(cluster: Cluster, job: Job, *arguments: object, host: Host | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", __name__, job.__module__, job.__name__, cluster.address, json.dumps(arguments)]
    return (host or cluster.hosts[0]).start(command, stdout=PIPE, stderr=STDOUT)


def begun(cluster: Cluster, job: Job, *arguments: object, host: Host | None = None) -> "subprocess.Popen[str]":
    controller = started(cluster, job, *arguments, host=host)
    wait_for(controller, "ready")
    return controller


def wait_for(controller: "subprocess.Popen[str]", words: str) -> str:
    """Read until a line of a controller matches from its beginning; all that it said."""
    assert controller.stdout
    said: list[str] = []
    while not (said and re.match(words, said[-1])):
        said.append(controller.stdout.readline())
        assert said[-1], "".join(said)
    return "".join(said)


def answered(controller: "subprocess.Popen[str]", status: int = 0) -> Any:
    said = controller.communicate()[0]
    assert controller.returncode == status, said
    (told,) = (line.removeprefix(ANSWER) for line in said.splitlines() if line.startswith(ANSWER))
    return json.loads(told)


def do(cluster: Cluster, job: Job, *arguments: object, host: Host | None = None) -> Any:
    return answered(started(cluster, job, *arguments, host=host))


def traffic(cluster: Cluster) -> NDArray[np.float64]:
    return np.array([host.traffic() for host in cluster.hosts]) / MIB


def say(words: str) -> None:
    print(words, flush=True)  # noqa: T201


def on(host: str, cpus: int = 0) -> rl.Resources:
    return rl.Resources(cpus=cpus, custom={host: 1})


class Traveller(rl.Actor):
    def __init__(self) -> None:
        self._counted = 0

    @rl.endpoint
    async def here(self) -> rl.Gather[dict[str, np.ndarray]]:
        found = {"host": socket.gethostname(), "pid": os.getpid(), "clock": time.monotonic()}
        return {name: np.array([value]) for name, value in found.items()}

    @rl.endpoint
    async def environment(self, *names: str) -> rl.Gather[np.ndarray]:
        return np.array([" ".join(os.environ[name] for name in names)])

    @rl.endpoint
    async def make(self, rows: int, tokens: int) -> rl.Gather[rl.Batch]:
        return rl.Batch.of(tokens=rl.Ragged.of([np.arange(tokens)] * rows, np.int32))

    @rl.endpoint
    async def twice(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return batch.assign(tokens=rl.Ragged(np.multiply(batch.tokens.values, 2), batch.tokens.offsets))

    @rl.endpoint
    async def weights(self, count: int) -> rl.Gather[rl.Weights, EVERY]:
        number = rl.current_rank().index
        return rl.Weights(1, {str(number): np.full(count, number + 1, np.float32)})

    @rl.endpoint
    async def way(self, weights: rl.Weights) -> Same[str]:
        assert not any(bucket.damaged() for bucket in weights.buckets)
        return ", ".join(weights.transports)

    @rl.endpoint
    async def count(self) -> rl.Gather[np.ndarray]:
        self._counted += 1
        return np.array([self._counted])

    @rl.endpoint
    async def say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201 -- what is tested

    @rl.endpoint
    async def die(self) -> None:
        print("last words", flush=True)  # noqa: T201 -- what is tested
        ctypes.string_at(0)


async def made(engine: RayEngine, host: str) -> Traveller:
    return await (await rl.Mesh.reserve(engine, 1, on(host))).spawn(Traveller)


async def told(call: Awaitable[object]) -> str:
    """The error of a call, or the text that it returns."""
    try:
        return str(await call)
    except MeshrlError as failure:
        return f"{type(failure).__name__}: {failure}"


async def on_and_on(one: Traveller) -> None:
    while True:
        await one.count()
        await asyncio.sleep(0.05)


async def places(engine: RayEngine) -> object:
    """Where two spread ranks are, what torch.distributed is told there, and how far their clocks are from ours."""
    spawned = await (await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=0, placement="spread"))).spawn(Traveller)
    here, told = await spawned.here(), await spawned.environment("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return here["host"].tolist(), told.tolist(), (here["clock"] - time.monotonic()).tolist()


async def hosts_of(engine: RayEngine, count: int, each: dict[str, float]) -> object:
    """Where so many ranks are that ask for this; what is told where there is no room for them."""
    try:
        mesh = await rl.Mesh.reserve(engine, count, rl.Resources(cpus=0, custom=each))
    except NoRoom as error:
        return str(error)
    return (await (await mesh.spawn(Traveller)).here())["host"].tolist()


async def rows_between(engine: RayEngine, maker: str, taker: str, mib: int) -> object:
    """Rows made on one host, changed on another and read here: the last token."""
    source, taken = await made(engine, maker), await made(engine, taker)
    doubled = await taken.twice(await source.make(4, mib * MIB // 16))
    return int((await doubled.select([3]).load()).tokens.values[-1])


async def crowded(engine: RayEngine) -> object:
    """Ranks that take a core of each of two hosts, and one that asks for what is left: the threads it has."""
    await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=1, custom={"train": 1}))
    await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=1, custom={"rollout": 1}))
    left = await (await rl.Mesh.reserve(engine, 1, rl.Resources())).spawn(Traveller)
    return (await left.environment("OMP_NUM_THREADS")).tolist()


async def calls(engine: RayEngine, host: str) -> object:
    one = await made(engine, host)
    await one.count()
    say("ready")
    return await told(on_and_on(one))


async def revived(engine: RayEngine, host: str) -> object:
    one = await made(engine, host)
    say("ready")
    say(await told(on_and_on(one)))
    await rl.respawn(one)
    return (await one.here())["host"].tolist()


async def ways(engine: RayEngine, maker: str, takers: list[str], mib: int, rounds: int) -> object:
    """How weights come to two ranks of each of some hosts, of which all but the first round are told as they begin."""
    source = await made(engine, maker)
    taken = [await (await rl.Mesh.reserve(engine, 2, on(host))).spawn(Traveller) for host in takers]
    answers: list[object] = []
    for number in range(rounds):
        weights = await source.weights(mib * MIB // 4)
        if number:
            say("ready")
        answers.append(await asyncio.gather(*(told(each.way(weights)) for each in taken)))
    return answers


async def joined(engine: RayEngine) -> object:
    """Begin with one rank of two; what is told of the other when its node joins, and where the first is then."""
    mesh = await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=0, custom={"rollout": 1}, min_ranks=1))
    one = await mesh.spawn(Traveller)
    say("ready")
    refused = await told(rl.respawn(rl.at(one, dp=1)))
    return refused, (await rl.at(one, dp=0).here())["host"].tolist()


async def waited(engine: RayEngine, host: str) -> object:
    """Calls on a host that is away for some seconds, and slow and lossy afterwards: how many it has counted."""
    worker = await made(engine, host)
    say("ready")
    for _ in range(100):
        await worker.count()
        await asyncio.sleep(0.1)
    return int((await worker.count())[0])


async def lost(engine: RayEngine, here: str, cut: str, elsewhere: str) -> object:
    """What is told of rows on a host that is cut off: here, on a rank here, and on one elsewhere; its process."""
    maker, near, far = [await made(engine, host) for host in (cut, here, elsewhere)]
    batches = [await maker.make(4, MIB // 4) for _ in range(3)]
    (pid,) = (await maker.here())["pid"].tolist()
    say("ready")
    await asyncio.sleep(5)
    waits = batches[0].load(), near.twice(batches[1]), far.twice(batches[2]), maker.count()
    return pid, await asyncio.gather(*map(told, waits))


async def left(engine: RayEngine, host: str) -> object:
    """What is told of a call, and of a reservation, when the head goes."""
    worker = await made(engine, host)
    say("ready")

    async def reserve() -> None:
        await asyncio.sleep(5)
        await rl.Mesh.reserve(engine, 1, on(host))

    return await asyncio.gather(told(on_and_on(worker)), told(reserve()))


async def written(engine: RayEngine, host: str) -> object:
    """A rank on this host writes and dies: what the error tells, and the file on this one."""
    talks = await (await rl.Mesh.reserve(engine, 1, on(host), "far", str(LOGS))).spawn(Traveller)
    await talks.say("hello from there")
    return await told(talks.die()), (LOGS / "far-0.log").read_text()


async def written_around_a_cut(engine: RayEngine, host: str) -> object:
    """A rank writes, its host is given up when that is here, and a new rank writes: what the error and the log tell."""

    async def says(line: str) -> str:
        await talks.say(line)
        while line not in (text := (LOGS / "cut-0.log").read_text()):  # noqa: ASYNC110 -- another process writes it
            await asyncio.sleep(0.1)
        return text

    talks = await (await rl.Mesh.reserve(engine, 1, on(host), "cut", str(LOGS))).spawn(Traveller)
    await says("hello from there")
    say("ready")
    say(error := await told(on_and_on(talks)))
    await rl.respawn(talks)
    return error, await says("hello after the cut")


async def main(module: str, name: str, address: str, arguments: str) -> None:
    engine = RayEngine(address)
    try:
        job = getattr(importlib.import_module(module), name)
        print(ANSWER + json.dumps(await job(engine, *json.loads(arguments))))  # noqa: T201 -- the test reads it
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
