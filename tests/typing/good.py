"""What a user writes, and what its types are. Both checkers find nothing here; `main` runs."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Literal, assert_type

import numpy as np
from numpy.typing import NDArray

from meshrl import (
    TP,
    Actor,
    Batch,
    Gather,
    LocalEngine,
    Mean,
    Mesh,
    Metrics,
    Rank,
    Replicate,
    Same,
    Shard,
    Sum,
    at,
    each,
    endpoint,
    ranks,
    stop,
)

Expert = Literal["expert"]
"""An axis of one's own."""
Both = Literal["dp", "tp"]
"""A joint axis."""


class Trainer(Actor, ABC):
    """A role: the contract, once."""

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], rate: float = 1.0) -> Mean[Metrics]:
        """One step."""

    @endpoint
    @abstractmethod
    def rows(self, batch: Shard[Batch]) -> AsyncIterator[Gather[Batch]]:
        """Rows as they come."""


class PlainTrainer(Trainer):
    """An implementation: plain types, more attributes than the role has."""

    def __init__(self, scale: float, *, name: str = "plain") -> None:
        self.scale = scale
        self.name = name

    async def update(self, batch: Batch, rate: float = 1.0) -> Metrics:
        return Metrics.of(loss=(self.scale * rate, len(batch)))

    async def rows(self, batch: Batch) -> AsyncIterator[Batch]:
        yield batch


class Marks(Actor):
    """Every mark, on one axis and on others."""

    @endpoint
    async def gather(self, batch: Shard[Batch]) -> Gather[Batch]:
        return batch

    @endpoint
    async def array(self, values: Shard[NDArray[np.float32], Both]) -> Gather[NDArray[np.float32], Both]:
        return values

    @endpoint
    async def table(self, values: Shard[dict[str, Batch]]) -> Gather[dict[str, Batch]]:
        return values

    @endpoint
    async def several(self, values: Shard[list[Batch]]) -> Gather[list[Batch]]:
        return values

    @endpoint
    async def optional(self, batch: Shard[Batch | None] = None) -> Sum[int]:
        return 0 if batch is None else len(batch)

    @endpoint
    async def mean(self, value: Replicate[float]) -> Mean[float]:
        return value

    @endpoint
    async def means(self, value: float) -> Mean[Mapping[str, float]]:
        return {"value": value}

    @endpoint
    async def same(self, word: str) -> Same[str]:
        return word

    @endpoint
    async def along(self, batch: Shard[Batch, TP]) -> Sum[int, TP]:
        return len(batch)

    @endpoint
    async def nothing(self) -> None:
        """Return nothing."""


class Experts(Actor):
    """Marks on an axis of one's own."""

    @endpoint
    async def count(self, batch: Shard[Batch, Expert]) -> Sum[int, Expert]:
        return len(batch)


class Caller(Actor):
    """An actor that is given a handle of another."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @endpoint
    async def call(self, batch: Batch) -> Same[Metrics]:
        return await self.trainer.update(batch)


async def train(trainer: Trainer, batch: Batch) -> Metrics:
    """An algorithm sees the role alone, on a mesh or as a plain object."""
    return await trainer.update(batch, rate=0.5)


async def roles(mesh: Mesh, batch: Batch) -> None:
    trainer = await mesh.spawn(PlainTrainer, 2.0, name="mine")
    assert_type(trainer, PlainTrainer)
    assert_type(await trainer.update(batch), Metrics)
    assert_type(await train(trainer, batch), Metrics)
    assert_type(await train(PlainTrainer(1.0), batch), Metrics)
    assert_type(await each(trainer.update)(batch, rate=2.0), list[Metrics])
    assert_type(await asyncio.create_task(trainer.update(batch)), Metrics)
    first = at(trainer, dp=0)
    assert_type(first, PlainTrainer)
    assert_type(await first.update(batch), Metrics)
    assert_type(ranks(trainer), list[Rank])
    async for rows in trainer.rows(batch):
        assert_type(rows, Batch)
    caller = await mesh.spawn(Caller, trainer)
    assert_type(await caller.call(batch), Metrics)
    await stop(caller)


async def marks(mesh: Mesh, batch: Batch) -> None:
    actor = await mesh.spawn(Marks)
    values = np.ones(3, np.float32)
    assert_type(await actor.gather(batch), Batch)
    assert_type(await actor.array(values), NDArray[np.float32])
    assert_type(await actor.table({"one": batch}), dict[str, Batch])
    assert_type(await actor.several([batch]), list[Batch])
    assert_type(await actor.optional(), int)
    assert_type(await actor.optional(batch=batch), int)
    assert_type(await actor.mean(2.0), float)
    assert_type(await actor.means(2.0), Mapping[str, float])
    assert_type(await actor.same("word"), str)
    assert_type(await actor.along(batch), int)
    await actor.nothing()
    experts = await (mesh.shape(expert=4)).spawn(Experts)
    assert_type(await experts.count(batch), int)


async def main() -> None:
    engine = LocalEngine()
    try:
        batch = Batch.of(rewards=np.arange(5, dtype=np.float32))
        mesh = await Mesh.reserve(engine, 4)
        await roles(mesh, batch)
        await marks(mesh.shape(dp=2, tp=2), batch)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
