# The classes here are wrong on purpose.
# mypy: disable-error-code="empty-body, override, type-var, no-untyped-def"
# pyright: reportReturnType=false, reportIncompatibleMethodOverride=false, reportInvalidTypeForm=false
# pyright: reportInvalidTypeArguments=false, reportUnknownParameterType=false
"""Mistakes in an actor's endpoints, told when it is spawned, and in calls, told before anything is sent."""

import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import meshrl as rl

if TYPE_CHECKING:
    from decimal import Decimal

BATCH = rl.Batch.of(rewards=np.arange(4, dtype=np.float32))


async def _spawn(cls: type) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        await (await run.mesh(2)).spawn(cls)


class Wrong:
    """Endpoints with a mistake each."""

    async def unmarked_result(self, batch: rl.Shard[rl.Batch]) -> int: ...
    async def no_result_annotation(self, batch: rl.Shard[rl.Batch]): ...
    async def missing_axis(self, batch: rl.Shard[rl.Batch, rl.TP]) -> None: ...
    async def unsplittable(self, text: rl.Shard[str]) -> None: ...
    async def unjoinable(self) -> rl.Gather[str]: ...
    def not_async(self) -> rl.Same[int]: ...
    async def yields_without_a_stream(self) -> rl.Gather[rl.Batch]:  # type: ignore[misc]
        yield BATCH

    async def stream_of_means(self) -> AsyncIterator[rl.Mean[rl.Metrics]]:
        yield rl.Metrics.of()

    async def mark_on_the_wrong_side(self, batch: rl.Gather[rl.Batch]) -> rl.Shard[rl.Batch]: ...
    async def annotation_for_the_checker_alone(self, price: "Decimal") -> None: ...
    async def changed_contract(self, batch: rl.Shard[rl.Batch, rl.TP], loss: rl.Loss) -> rl.Same[rl.Metrics]: ...
    async def changed_parameters(self, rows: rl.Batch) -> rl.Metrics: ...
    async def one_parameter_more(self, batch: rl.Batch, loss: rl.Loss, beta: float) -> rl.Metrics: ...
    async def no_actor(self) -> None: ...


class Started(rl.Policy):
    """A backend's policy, begun: it has no `update`."""

    async def encode(self, batch: rl.Batch) -> rl.Batch: ...
    async def logprobs(self, batch: rl.Batch) -> rl.Batch: ...
    async def weights(self) -> Any: ...
    async def save(self, folder: str) -> None: ...
    async def checkpoint(self, folder: str, wait: bool = True) -> None: ...
    async def restore(self, folder: str) -> None: ...
    @abstractmethod
    async def update(self, batch: rl.Batch, loss: rl.Loss) -> rl.Metrics: ...


def _has(name: str, mistake: Callable[..., object], base: type = rl.Actor) -> Callable[[], object]:
    """Spawns a class that has the mistake as its endpoint, under the name `Class.endpoint`."""
    owner, _, method = name.partition(".")
    mistake.__name__ = method
    return lambda: _spawn(type(base)(owner, (base,), {method: rl.endpoint(mistake)}))


class Worker(rl.Actor):
    """An actor in which nothing is wrong."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @rl.endpoint
    async def scaled(
        self, batch: rl.Shard[rl.Batch], factors: rl.Shard[np.ndarray] | None = None
    ) -> rl.Gather[rl.Batch]:
        return batch.assign(rewards=batch.rewards * np.float32(self.scale))

    @rl.endpoint
    async def stream(self, batch: rl.Shard[rl.Batch]) -> AsyncIterator[rl.Gather[rl.Batch]]:
        yield batch

    @rl.endpoint
    async def fewer(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return rl.Batch.of(rewards=batch.rewards[:1])

    @rl.endpoint
    async def total(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[np.ndarray]:
        return np.array([batch.rewards.sum()])


async def _call(endpoint: str, *arguments: object) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        worker = await (await run.mesh(2)).spawn(Worker)
        await getattr(worker, endpoint)(*arguments)


async def _mesh(count: int, use: Callable[[Any], Any]) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        if inspect.isawaitable(used := use(await run.mesh(count))):
            await used


async def _worker(use: Callable[[Any], object]) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        use(await (await run.mesh(2)).spawn(Worker))


MISTAKES: dict[str, Callable[[], object]] = {
    "unmarked-result": _has("Counter.count", Wrong.unmarked_result),
    "no-result-annotation": _has("Counter.count", Wrong.no_result_annotation),
    "missing-axis": _has("Layer.forward", Wrong.missing_axis),
    "unsplittable": _has("Speaker.say", Wrong.unsplittable),
    "unjoinable": _has("Speaker.hear", Wrong.unjoinable),
    "not-async": _has("Counter.count", Wrong.not_async),
    "yields-without-a-stream": _has("Counter.count", Wrong.yields_without_a_stream),
    "stream-of-means": _has("Counter.count", Wrong.stream_of_means),
    "mark-on-the-wrong-side": _has("Copier.copy", Wrong.mark_on_the_wrong_side),
    "annotation-for-the-checker-alone": _has("Counter.add", Wrong.annotation_for_the_checker_alone),
    "changed-contract": _has("MyPolicy.update", Wrong.changed_contract, Started),
    "changed-parameters": _has("MyPolicy.update", Wrong.changed_parameters, Started),
    "one-parameter-more": _has("MyPolicy.update", Wrong.one_parameter_more, Started),
    "no-actor": _has("Counter.count", Wrong.no_actor, object),
    "abstract-role": lambda: _spawn(Started),
    "wrong-arguments": lambda: _call("scaled", BATCH, None, 3),
    "unknown-endpoint": lambda: _call("scale", BATCH),
    "rows-that-are-none": lambda: _call("scaled", ["a", "b"]),
    "misaligned-rows": lambda: _call("scaled", BATCH, np.ones(3)),
    "rows-that-do-not-come-back": lambda: _call("fewer", BATCH),
    "elements-that-do-not-come-back": lambda: _call("total", BATCH),
    "mesh-shape": lambda: _mesh(4, lambda mesh: mesh.shape(dp=2, tp=3)),
    "no-ranks": lambda: _mesh(0, lambda mesh: mesh),
    "an-instance-is-spawned": lambda: _mesh(1, lambda mesh: mesh.spawn(Worker())),
    "wrong-constructor-arguments": lambda: _mesh(1, lambda mesh: mesh.spawn(Worker, factor=2)),
    "each-of-a-stream": lambda: _worker(lambda worker: rl.each(worker.stream)),
    "no-such-rank": lambda: _worker(lambda worker: rl.at(worker, dp=2)),
    "ranks-of-a-plain-object": lambda: rl.ranks(Worker()),
}
