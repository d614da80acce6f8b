"""Jobs: what tests of several hosts run on one of them, in a process of its own: `python -m tests.cluster.jobs`.

A job is a function that is given an engine of the cluster, and returns what JSON can hold.
"""

import asyncio
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from subprocess import PIPE, STDOUT
from typing import Any

import numpy as np

from meshrl import (
    EVERY,
    Actor,
    Batch,
    Gather,
    Mesh,
    Ragged,
    RankDied,
    Resources,
    Same,
    Shard,
    Weights,
    current_rank,
    endpoint,
    respawn,
)
from meshrl.engines.ray import RayEngine
from meshrl.errors import NoRoom
from meshrl.testing.cluster import Cluster, Host

MIB = 1 << 20
ANSWER = "answer: "
"""Goes before what a job returns, among the lines that Ray writes."""


def command(cluster: Cluster, job: Callable[..., Awaitable[object]], *arguments: object) -> list[str]:
    """The command that runs a job."""
    return [sys.executable, "-m", __name__, job.__module__, job.__name__, cluster.address, json.dumps(arguments)]


def begun(
    cluster: Cluster, job: Callable[..., Awaitable[object]], *arguments: object, host: Host | None = None
) -> "subprocess.Popen[str]":
    """A job on a host, the first if none is named, that has said that it is ready."""
    controller = (host or cluster.hosts[0]).start(command(cluster, job, *arguments), stdout=PIPE, stderr=STDOUT)
    wait_for(controller, "ready")
    return controller


def wait_for(controller: "subprocess.Popen[str]", words: str) -> str:
    """Read until a line of a controller begins so; all that it said."""
    assert controller.stdout
    said: list[str] = []
    while not (line := controller.stdout.readline()).startswith(words):
        said.append(line)
        assert line, "".join(said)
    return "".join(said)


def answer(said: str) -> Any:
    """What a job has returned, in what it wrote."""
    (told,) = (line.removeprefix(ANSWER) for line in said.splitlines() if line.startswith(ANSWER))
    return json.loads(told)


def answered(controller: "subprocess.Popen[str]") -> Any:
    """What a job returns in the end."""
    return answer(controller.communicate()[0])


def do(cluster: Cluster, job: Callable[..., Awaitable[object]], *arguments: object, host: Host | None = None) -> Any:
    """Run a job on a host, the first if none is named; what it returns."""
    try:
        return answer((host or cluster.hosts[0]).run(command(cluster, job, *arguments)))
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.output) from None


def say(words: str) -> None:
    """Tell the test, which waits for it."""
    print(words, flush=True)  # noqa: T201


def on(host: str, cpus: int = 0) -> Resources:
    """A place on the host of this name."""
    return Resources(cpus=cpus, custom={host: 1})


class Traveller(Actor):
    """Makes rows and weights, takes them, and tells where it is."""

    @endpoint
    async def where(self) -> Gather[np.ndarray]:
        return np.array([socket.gethostname()])

    @endpoint
    async def clock(self) -> Gather[np.ndarray]:
        return np.array([time.monotonic()])

    @endpoint
    async def environment(self, *names: str) -> Gather[np.ndarray]:
        return np.array([" ".join(os.environ[name] for name in names)])

    @endpoint
    async def make(self, rows: int, tokens: int) -> Gather[Batch]:
        return Batch.of(tokens=Ragged.of([np.arange(tokens)] * rows, np.int32))

    @endpoint
    async def twice(self, batch: Shard[Batch]) -> Gather[Batch]:
        return batch.assign(tokens=Ragged(np.multiply(batch.tokens.values, 2), batch.tokens.offsets))

    @endpoint
    async def weights(self, count: int) -> Gather[Weights, EVERY]:
        number = current_rank().index
        return Weights(1, {str(number): np.full(count, number + 1, np.float32)})

    @endpoint
    async def take(self, weights: Weights) -> Same[float]:
        return float(sum(tensor.mean() for tensor in weights.tensors.values()))


async def places(engine: RayEngine) -> object:
    """Where two spread ranks are, what torch.distributed is told there, and how far their clocks are from ours."""
    spread = Resources(cpus=0, placement="spread")
    mesh = await Mesh.reserve(engine, 2, spread)
    spawned = await mesh.spawn(Traveller)
    hosts, told = await spawned.where(), await spawned.environment("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return hosts.tolist(), told.tolist(), (await spawned.clock() - time.monotonic()).tolist()


async def hosts_of(engine: RayEngine, count: int, each: dict[str, float]) -> object:
    """Where so many ranks are that ask for this; what is told where there is no room for them."""
    try:
        mesh = await Mesh.reserve(engine, count, Resources(cpus=0, custom=each))
    except NoRoom as error:
        return str(error)
    return (await (await mesh.spawn(Traveller)).where()).tolist()


async def rows_between(engine: RayEngine, maker: str, taker: str, mib: int) -> object:
    """Rows made on one host, changed on another and read here: the last token."""
    made = await (await Mesh.reserve(engine, 1, on(maker))).spawn(Traveller)
    taken = await (await Mesh.reserve(engine, 1, on(taker))).spawn(Traveller)
    doubled = await taken.twice(await made.make(4, mib * MIB // 16))
    return int((await doubled.select([3]).load()).tokens.values[-1])


async def crowded(engine: RayEngine) -> object:
    """Ranks that take a core of each of two hosts, and one that asks for what is left: the threads it has."""
    await Mesh.reserve(engine, 2, Resources(cpus=1, custom={"train": 1}))
    await Mesh.reserve(engine, 2, Resources(cpus=1, custom={"rollout": 1}))
    left = await (await Mesh.reserve(engine, 1, Resources())).spawn(Traveller)
    return (await left.environment("OMP_NUM_THREADS")).tolist()


async def calls(engine: RayEngine, host: str) -> object:
    """Call a rank of a host again and again."""
    one = await (await Mesh.reserve(engine, 1, on(host))).spawn(Traveller)
    await one.clock()
    say("ready")
    while True:
        await one.clock()
        await asyncio.sleep(0.05)


async def revived(engine: RayEngine, host: str) -> object:
    """Call a rank until it dies, make it again, and ask where it is."""
    one = await (await Mesh.reserve(engine, 1, on(host))).spawn(Traveller)
    say("ready")
    try:
        while True:
            await one.clock()
            await asyncio.sleep(0.05)
    except RankDied:
        say("RankDied")
    await respawn(one)
    return (await one.where()).tolist()


async def main(module: str, name: str, address: str, arguments: str) -> None:
    engine = RayEngine(address)
    try:
        job = getattr(importlib.import_module(module), name)
        print(ANSWER + json.dumps(await job(engine, *json.loads(arguments))))  # noqa: T201 -- the test reads it
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
