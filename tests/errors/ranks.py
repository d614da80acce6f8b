"""Mistakes that show on the ranks, and backends that cannot be had."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

import meshrl as rl
from meshrl.roles import implementation

TOKENS = rl.Ragged.of([[1, 2], [3]], np.int32)
BATCH = rl.Batch.of(tokens=TOKENS, loss_mask=rl.Ragged.of([[False, True], [True]], np.bool_))


class Worker(rl.Actor):
    """An actor with mistakes in its endpoints."""

    def __init__(self, device: int = 0) -> None:
        if device > 1:
            raise OSError(f"no device {device}")

    @rl.endpoint
    async def index(self) -> rl.Same[int]:
        return rl.current_rank().index

    @rl.endpoint
    async def divide(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[np.ndarray]:
        return np.ones(len(batch)) / (1 // (1 - rl.current_rank().index))

    @rl.endpoint
    async def write(self, batch: rl.Shard[rl.Batch]) -> None:
        batch.tokens.values[0] = 0

    @rl.endpoint
    async def hold(self, what: object) -> None: ...

    @rl.endpoint
    async def make(self) -> rl.Gather[rl.Batch]:
        return rl.Batch.of(tokens=rl.Ragged.of([np.zeros(40_000)], np.int32))

    @rl.endpoint
    async def weights(self) -> rl.Same[rl.Weights]:
        return rl.Weights(3, {"embedding": np.zeros((200, 200), np.float32)})


async def _call(endpoint: str, *arguments: object, ranks: int = 2, device: int = 0) -> Any:
    async with rl.Run(rl.RunConfig()) as run:
        return await getattr(await (await run.mesh(ranks)).spawn(Worker, device=device), endpoint)(*arguments)


async def _spawn(role: type[rl.Actor], config: rl.RoleConfig) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        await run.spawn(role, config)


async def stopped_actor() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        worker = await (await run.mesh(2)).spawn(Worker)
        await rl.stop(worker)
        await worker.index()


async def column_that_was_not_loaded() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        batch = await (await (await run.mesh(2)).spawn(Worker)).make()
        _ = batch.tokens


async def weights_that_were_not_loaded() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        weights = await (await (await run.mesh(1)).spawn(Worker)).weights()
        _ = weights.tensors


async def gpus_without_a_cluster() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        await run.mesh(2, rl.Resources(gpus=1))


def backend_without_its_package() -> None:
    # A package as pip installs one, which announces a backend that imports what is not there.
    about = Path("slow-1.0.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Name: slow\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text("[meshrl.backends]\nslow = slow_backend\n", "utf-8")
    Path("slow_backend.py").write_text("import jaxx\n", "utf-8")
    implementation(cast("Any", rl.Policy), "slow")


class Memory(rl.Actor):
    """Not a role."""


MISTAKES: dict[str, Callable[[], object]] = {
    "ranks-that-disagree": lambda: _call("index"),
    "rank-that-raises": lambda: _call("divide", BATCH),
    "rank-that-writes-its-argument": lambda: _call("write", BATCH, ranks=1),
    "constructor-that-raises": lambda: _call("index", device=2),
    "lock-as-an-argument": lambda: _call("hold", threading.Lock(), ranks=1),
    "unknown-backend": lambda: _spawn(rl.Policy, rl.PolicyConfig(backend="torhc", model="none")),
    "backend-without-the-role": lambda: _spawn(rl.Sampler, rl.SamplerConfig(backend="fsdp", model="none")),
    "own-actor-as-a-role": lambda: _spawn(Memory, rl.RoleConfig(backend="fake")),
}
