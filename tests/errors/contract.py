# The classes here are wrong on purpose.
# mypy: disable-error-code="empty-body, override, type-var, no-untyped-def"
# pyright: reportReturnType=false, reportIncompatibleMethodOverride=false, reportInvalidTypeForm=false
# pyright: reportInvalidTypeArguments=false, reportUnknownParameterType=false
"""Mistakes in an actor's endpoints, told when it is spawned, and in calls, told before anything is sent."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshrl import (
    TP,
    Actor,
    Batch,
    Gather,
    Loss,
    Mean,
    Metrics,
    Policy,
    Run,
    RunConfig,
    Same,
    Shard,
    at,
    each,
    endpoint,
    ranks,
)

if TYPE_CHECKING:
    from decimal import Decimal

BATCH = Batch.of(rewards=np.arange(4, dtype=np.float32))


async def _spawn(cls: type) -> None:
    async with Run(RunConfig()) as run:
        await (await run.mesh(2)).spawn(cls)


# --- endpoints -----------------------------------------------------------------------------------


async def unmarked_result() -> None:
    class Counter(Actor):
        @endpoint
        async def count(self, batch: Shard[Batch]) -> int: ...

    await _spawn(Counter)


async def no_result_annotation() -> None:
    class Counter(Actor):
        @endpoint
        async def count(self, batch: Shard[Batch]): ...

    await _spawn(Counter)


async def missing_axis() -> None:
    class Layer(Actor):
        @endpoint
        async def forward(self, batch: Shard[Batch, TP]) -> None: ...

    await _spawn(Layer)


async def unsplittable() -> None:
    class Speaker(Actor):
        @endpoint
        async def say(self, text: Shard[str]) -> None: ...

    await _spawn(Speaker)


async def unjoinable() -> None:
    class Speaker(Actor):
        @endpoint
        async def hear(self) -> Gather[str]: ...

    await _spawn(Speaker)


async def not_async() -> None:
    class Counter(Actor):
        @endpoint
        def count(self) -> Same[int]: ...

    await _spawn(Counter)


async def yields_without_a_stream() -> None:
    class Counter(Actor):
        @endpoint
        async def count(self) -> Gather[Batch]:  # type: ignore[misc]
            yield BATCH

    await _spawn(Counter)


async def stream_of_means() -> None:
    class Counter(Actor):
        @endpoint
        async def count(self) -> AsyncIterator[Mean[Metrics]]:
            yield Metrics.of()

    await _spawn(Counter)


async def mark_on_the_wrong_side() -> None:
    class Copier(Actor):
        @endpoint
        async def copy(self, batch: Gather[Batch]) -> Shard[Batch]: ...

    await _spawn(Copier)


async def annotation_for_the_checker_alone() -> None:
    class Counter(Actor):
        @endpoint
        async def add(self, price: "Decimal") -> None: ...

    await _spawn(Counter)


class Started(Policy):
    """A backend's policy, begun: it has no `update`."""

    async def encode(self, batch: Batch) -> Batch: ...
    async def logprobs(self, batch: Batch) -> Batch: ...
    async def weights(self) -> Any: ...
    async def save(self, folder: str) -> None: ...
    async def checkpoint(self, folder: str, wait: bool = True) -> None: ...
    async def restore(self, folder: str) -> None: ...
    @abstractmethod
    async def update(self, batch: Batch, loss: Loss) -> Metrics: ...


async def changed_contract() -> None:
    class MyPolicy(Started):
        async def update(self, batch: Shard[Batch, TP], loss: Loss) -> Same[Metrics]: ...

    await _spawn(MyPolicy)


async def changed_parameters() -> None:
    class MyPolicy(Started):
        async def update(self, rows: Batch) -> Metrics: ...

    await _spawn(MyPolicy)


async def one_parameter_more() -> None:
    class MyPolicy(Started):
        async def update(self, batch: Batch, loss: Loss, beta: float) -> Metrics: ...

    await _spawn(MyPolicy)


async def abstract_role() -> None:
    await _spawn(Started)


async def no_actor() -> None:
    class Counter:
        @endpoint
        async def count(self) -> None: ...

    await _spawn(Counter)


# --- meshes and calls ----------------------------------------------------------------------------


class Worker(Actor):
    """An actor in which nothing is wrong."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @endpoint
    async def scaled(self, batch: Shard[Batch], factors: Shard[np.ndarray] | None = None) -> Gather[Batch]:
        return batch.assign(rewards=batch.rewards * np.float32(self.scale))

    @endpoint
    async def stream(self, batch: Shard[Batch]) -> AsyncIterator[Gather[Batch]]:
        yield batch

    @endpoint
    async def fewer(self, batch: Shard[Batch]) -> Gather[Batch]:
        return Batch.of(rewards=batch.rewards[:1])

    @endpoint
    async def total(self, batch: Shard[Batch]) -> Gather[np.ndarray]:
        return np.array([batch.rewards.sum()])


async def _call(endpoint: str, *arguments: object) -> None:
    async with Run(RunConfig()) as run:
        worker = await (await run.mesh(2)).spawn(Worker)
        await getattr(worker, endpoint)(*arguments)


async def mesh_shape() -> None:
    async with Run(RunConfig()) as run:
        (await run.mesh(4)).shape(dp=2, tp=3)


async def no_ranks() -> None:
    async with Run(RunConfig()) as run:
        await run.mesh(0)


async def an_instance_is_spawned() -> None:
    async with Run(RunConfig()) as run:
        await cast("Any", await run.mesh(1)).spawn(Worker())


async def wrong_constructor_arguments() -> None:
    async with Run(RunConfig()) as run:
        await cast("Any", await run.mesh(1)).spawn(Worker, factor=2)


async def wrong_arguments() -> None:
    await _call("scaled", BATCH, None, 3)


async def unknown_endpoint() -> None:
    await _call("scale", BATCH)


async def rows_that_are_none() -> None:
    await _call("scaled", ["a", "b"])


async def misaligned_rows() -> None:
    await _call("scaled", BATCH, np.ones(3))


async def rows_that_do_not_come_back() -> None:
    await _call("fewer", BATCH)


async def elements_that_do_not_come_back() -> None:
    await _call("total", BATCH)


async def each_of_a_stream() -> None:
    async with Run(RunConfig()) as run:
        worker: Any = await (await run.mesh(2)).spawn(Worker)
        each(worker.stream)


async def no_such_rank() -> None:
    async with Run(RunConfig()) as run:
        at(await (await run.mesh(2)).spawn(Worker), dp=2)


def ranks_of_a_plain_object() -> None:
    ranks(Worker())
