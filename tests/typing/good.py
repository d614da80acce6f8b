"""What a user writes, and what its types are. Both checkers find nothing here; `main` runs."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Literal, assert_type

import numpy as np
from numpy.typing import NDArray

import meshrl as rl
from meshrl.mesh import Rank, Same

Expert = Literal["expert"]
"""An axis of one's own."""
Both = Literal["dp", "tp"]
"""A joint axis."""


class Trainer(rl.Actor, ABC):
    """A role: the contract, once."""

    @rl.endpoint
    @abstractmethod
    async def update(self, batch: rl.Shard[rl.Batch], rate: float = 1.0) -> rl.Mean[rl.Metrics]:
        """One step."""

    @rl.endpoint
    @abstractmethod
    def rows(self, batch: rl.Shard[rl.Batch]) -> AsyncIterator[rl.Gather[rl.Batch]]:
        """Rows as they come."""


class PlainTrainer(Trainer):
    """An implementation: plain types, more attributes than the role has."""

    def __init__(self, scale: float, *, name: str = "plain") -> None:
        self.scale = scale
        self.name = name

    async def update(self, batch: rl.Batch, rate: float = 1.0) -> rl.Metrics:
        return rl.Metrics.of(loss=(self.scale * rate, len(batch)))

    async def rows(self, batch: rl.Batch) -> AsyncIterator[rl.Batch]:
        yield batch


class Marks(rl.Actor):
    """Every mark, on one axis and on others."""

    @rl.endpoint
    async def gather(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return batch

    @rl.endpoint
    async def array(self, values: rl.Shard[NDArray[np.float32], Both]) -> rl.Gather[NDArray[np.float32], Both]:
        return values

    @rl.endpoint
    async def table(self, values: rl.Shard[dict[str, rl.Batch]]) -> rl.Gather[dict[str, rl.Batch]]:
        return values

    @rl.endpoint
    async def optional(self, batch: rl.Shard[rl.Batch | None] = None) -> rl.Sum[int]:
        return 0 if batch is None else len(batch)

    @rl.endpoint
    async def means(self, value: float) -> rl.Mean[Mapping[str, float]]:
        return {"value": value}

    @rl.endpoint
    async def same(self, word: str) -> Same[str]:
        return word

    @rl.endpoint
    async def own(self, batch: rl.Shard[rl.Batch, Expert]) -> rl.Sum[int, Expert]:
        return len(batch)

    @rl.endpoint
    async def nothing(self) -> None:
        """Return nothing."""


class Caller(rl.Actor):
    """An actor that is given a handle of another."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @rl.endpoint
    async def call(self, batch: rl.Batch) -> Same[rl.Metrics]:
        return await self.trainer.update(batch)


async def train(trainer: Trainer, batch: rl.Batch) -> rl.Metrics:
    """An algorithm sees the role alone, on a mesh or as a plain object."""
    return await trainer.update(batch, rate=0.5)


async def roles(mesh: rl.Mesh, batch: rl.Batch) -> None:
    trainer = await mesh.spawn(PlainTrainer, 2.0, name="mine")
    assert_type(trainer, PlainTrainer)
    assert_type(await trainer.update(batch), rl.Metrics)
    assert_type(await train(trainer, batch), rl.Metrics)
    assert_type(await train(PlainTrainer(1.0), batch), rl.Metrics)
    assert_type(await rl.each(trainer.update)(batch, rate=2.0), list[rl.Metrics])
    assert_type(await asyncio.create_task(trainer.update(batch)), rl.Metrics)
    first = rl.at(trainer, dp=0)
    assert_type(first, PlainTrainer)
    assert_type(await first.update(batch), rl.Metrics)
    assert_type(rl.ranks(trainer), list[Rank])
    async for rows in trainer.rows(batch):
        assert_type(rows, rl.Batch)
    caller = await mesh.spawn(Caller, trainer)
    assert_type(await caller.call(batch), rl.Metrics)
    await rl.stop(caller)


async def marks(mesh: rl.Mesh, batch: rl.Batch) -> None:
    actor = await mesh.spawn(Marks)
    values = np.ones(3, np.float32)
    assert_type(await actor.gather(batch), rl.Batch)
    assert_type(await actor.array(values), NDArray[np.float32])
    assert_type(await actor.table({"one": batch}), dict[str, rl.Batch])
    assert_type(await actor.optional(), int)
    assert_type(await actor.optional(batch=batch), int)
    assert_type(await actor.means(2.0), Mapping[str, float])
    assert_type(await actor.same("word"), str)
    assert_type(await actor.own(batch), int)
    await actor.nothing()


async def main() -> None:
    engine = rl.LocalEngine()
    try:
        batch = rl.Batch.of(rewards=np.arange(5, dtype=np.float32))
        mesh = await rl.Mesh.reserve(engine, 4)
        await roles(mesh, batch)
        await marks(mesh.shape(dp=2, tp=2, expert=1), batch)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
