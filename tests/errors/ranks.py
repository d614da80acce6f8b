"""Mistakes that show on the ranks, and backends that cannot be had."""

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshrl import (
    Actor,
    Batch,
    Gather,
    Policy,
    PolicyConfig,
    Ragged,
    Resources,
    RoleConfig,
    Run,
    RunConfig,
    Same,
    Sampler,
    SamplerConfig,
    Shard,
    Weights,
    current_rank,
    endpoint,
    stop,
)
from meshrl.roles import implementation

TOKENS = Ragged.of([[1, 2], [3]], np.int32)
BATCH = Batch.of(tokens=TOKENS, loss_mask=Ragged.of([[False, True], [True]], np.bool_))


class Worker(Actor):
    """An actor with mistakes in its endpoints."""

    def __init__(self, device: int = 0) -> None:
        if device > 1:
            raise OSError(f"no device {device}")

    @endpoint
    async def index(self) -> Same[int]:
        return current_rank().index

    @endpoint
    async def divide(self, batch: Shard[Batch]) -> Gather[np.ndarray]:
        return np.ones(len(batch)) / (1 // (1 - current_rank().index))

    @endpoint
    async def write(self, batch: Shard[Batch]) -> None:
        batch.tokens.values[0] = 0

    @endpoint
    async def hold(self, what: object) -> None: ...

    @endpoint
    async def make(self) -> Gather[Batch]:
        return Batch.of(tokens=Ragged.of([np.zeros(40_000)], np.int32))

    @endpoint
    async def weights(self) -> Same[Weights]:
        return Weights(3, {"embedding": np.zeros((200, 200), np.float32)})


async def ranks_that_disagree() -> None:
    async with Run(RunConfig()) as run:
        await (await (await run.mesh(2)).spawn(Worker)).index()


async def rank_that_raises() -> None:
    async with Run(RunConfig()) as run:
        await (await (await run.mesh(2)).spawn(Worker)).divide(BATCH)


async def rank_that_writes_its_argument() -> None:
    async with Run(RunConfig()) as run:
        await (await (await run.mesh(1)).spawn(Worker)).write(BATCH)


async def constructor_that_raises() -> None:
    async with Run(RunConfig()) as run:
        await (await run.mesh(2)).spawn(Worker, device=2)


async def stopped_actor() -> None:
    async with Run(RunConfig()) as run:
        worker = await (await run.mesh(2)).spawn(Worker)
        await stop(worker)
        await worker.index()


async def lock_as_an_argument() -> None:
    async with Run(RunConfig()) as run:
        await (await (await run.mesh(1)).spawn(Worker)).hold(threading.Lock())


async def column_that_was_not_loaded() -> None:
    async with Run(RunConfig()) as run:
        batch = await (await (await run.mesh(2)).spawn(Worker)).make()
        _ = batch.tokens


async def weights_that_were_not_loaded() -> None:
    async with Run(RunConfig()) as run:
        weights = await (await (await run.mesh(1)).spawn(Worker)).weights()
        _ = weights.tensors


async def gpus_without_a_cluster() -> None:
    async with Run(RunConfig()) as run:
        await run.mesh(2, Resources(gpus=1))


# --- backends ------------------------------------------------------------------------------------


async def unknown_backend() -> None:
    async with Run(RunConfig()) as run:
        await run.spawn(Policy, PolicyConfig(backend="torhc", model="none"))


async def backend_without_the_role() -> None:
    async with Run(RunConfig()) as run:
        await run.spawn(Sampler, SamplerConfig(backend="fsdp", model="none"))


async def own_actor_as_a_role() -> None:
    class Memory(Actor):
        pass

    async with Run(RunConfig()) as run:
        await run.spawn(Memory, RoleConfig(backend="fake"))


def backend_without_its_package() -> None:
    # A package as pip installs one, which announces a backend that imports what is not there.
    about = Path("slow-1.0.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Name: slow\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text("[meshrl.backends]\nslow = slow_backend\n", "utf-8")
    Path("slow_backend.py").write_text("import jaxx\n", "utf-8")
    implementation(cast("Any", Policy), "slow")
