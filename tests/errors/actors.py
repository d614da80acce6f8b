# The classes here are wrong on purpose.
# mypy: disable-error-code="empty-body, override, type-var, no-untyped-def"
# pyright: reportReturnType=false, reportIncompatibleMethodOverride=false, reportInvalidTypeForm=false
# pyright: reportInvalidTypeArguments=false, reportUnknownParameterType=false
"""Mistakes in an actor's endpoints, in calls, and on the ranks, and backends that cannot be had."""

import inspect
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import meshrl as rl
from meshrl.algo import Loss
from meshrl.mesh import TP, Same
from meshrl.roles import RoleConfig, implementation

if TYPE_CHECKING:
    from decimal import Decimal

BATCH = rl.Batch.of(rewards=np.arange(4, dtype=np.float32), tokens=rl.Ragged.of([[1, 2], [3], [4], [5]], np.int32))


class Wrong:
    async def unmarked_result(self, batch: rl.Shard[rl.Batch]) -> int: ...
    async def no_result_annotation(self, batch: rl.Shard[rl.Batch]): ...
    async def missing_axis(self, batch: rl.Shard[rl.Batch, TP]) -> None: ...
    async def unsplittable(self, text: rl.Shard[str]) -> None: ...
    async def unjoinable(self) -> rl.Gather[str]: ...
    def not_async(self) -> Same[int]: ...
    async def yields_without_a_stream(self) -> rl.Gather[rl.Batch]:  # type: ignore[misc]
        yield BATCH

    async def stream_of_means(self) -> AsyncIterator[rl.Mean[rl.Metrics]]:
        yield rl.Metrics.of()

    async def mark_on_the_wrong_side(self, batch: rl.Gather[rl.Batch]) -> rl.Shard[rl.Batch]: ...
    async def annotation_for_the_checker_alone(self, price: "Decimal") -> None: ...
    async def changed_contract(self, batch: rl.Shard[rl.Batch, TP], loss: Loss) -> Same[rl.Metrics]: ...
    async def changed_parameters(self, rows: rl.Batch) -> rl.Metrics: ...
    async def one_parameter_more(self, batch: rl.Batch, loss: Loss, beta: float) -> rl.Metrics: ...
    async def no_actor(self) -> None: ...


class Started(rl.Policy):
    async def encode(self, batch: rl.Batch) -> rl.Batch: ...
    async def logprobs(self, batch: rl.Batch) -> rl.Batch: ...
    async def weights(self, adapter: str | None = None) -> Any: ...
    async def save(self, folder: str, adapter: str | None = None) -> None: ...
    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None: ...
    async def restore(self, folder: str, adapter: str | None = None) -> None: ...
    async def forward_backward(self, batch: rl.Batch, loss: Loss) -> rl.LossResult: ...


class Whole(Started):
    async def step(self, optimizer: rl.Step | None = None, adapter: str | None = None) -> rl.Metrics: ...


def _has(name: str, mistake: Callable[..., object], base: type = rl.Actor) -> Callable[[], object]:
    """Spawns a class that has the mistake as its endpoint, under the name `Class.endpoint`."""
    owner, _, method = name.partition(".")
    mistake.__name__ = method
    return lambda: _mesh(2, lambda mesh: mesh.spawn(type(base)(owner, (base,), {method: rl.endpoint(mistake)})))


class Worker(rl.Actor):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @rl.endpoint
    async def scaled(
        self, batch: rl.Shard[rl.Batch], factors: rl.Shard[np.ndarray] | None = None
    ) -> rl.Gather[rl.Batch]: ...

    @rl.endpoint
    async def hold(self, what: object) -> None: ...

    @rl.endpoint
    async def stream(self, batch: rl.Shard[rl.Batch]) -> AsyncIterator[rl.Gather[rl.Batch]]:
        yield batch

    @rl.endpoint
    async def fewer(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return rl.Batch.of(rewards=batch.rewards[:1])

    @rl.endpoint
    async def total(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[np.ndarray]:
        return np.array([batch.rewards.sum()])

    @rl.endpoint
    async def index(self) -> Same[int]:
        return rl.current_rank().index

    @rl.endpoint
    async def divide(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[np.ndarray]:
        return np.ones(len(batch)) / (1 // (1 - rl.current_rank().index))

    @rl.endpoint
    async def write(self, batch: rl.Shard[rl.Batch]) -> None:
        batch.tokens.values[0] = 0

    @rl.endpoint
    async def make(self) -> rl.Gather[rl.Batch]:
        return rl.Batch.of(tokens=rl.Ragged.of([np.zeros(40_000)], np.int32))

    @rl.endpoint
    async def weights(self) -> Same[rl.Weights]:
        return rl.Weights(3, {"embedding": np.zeros((200, 200), np.float32)})


class Memory(rl.Actor):
    """Not a role."""


async def _mesh(count: int, use: Callable[[Any], Any], resources: rl.Resources | None = None) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        if inspect.isawaitable(used := use(await run.mesh(count, resources))):
            await used


async def _worker(use: Callable[[Any], Any], ranks: int = 2) -> Any:
    async with rl.Run(rl.RunConfig()) as run:
        used = use(await (await run.mesh(ranks)).spawn(Worker))
        return await used if inspect.isawaitable(used) else used


async def _spawn(role: type[rl.Actor], config: RoleConfig) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        await run.spawn(role, config)


def constructor_that_raises() -> object:
    class Worker(rl.Actor):
        def __init__(self, device: int) -> None:
            raise OSError(f"no device {device}")

    return _mesh(2, lambda mesh: mesh.spawn(Worker, device=2))


async def _stopped(worker: Worker) -> None:
    await rl.stop(worker)
    await worker.index()


async def _made(worker: Worker) -> rl.Ragged:
    return (await worker.make()).tokens


async def _weights(worker: Worker) -> object:
    return (await worker.weights()).tensors


def backend_without_its_package() -> None:
    # A package as pip installs one, which announces a backend that imports what is not there.
    about = Path("slow-1.0.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Name: slow\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text("[meshrl.backends]\nslow = slow_backend\n", "utf-8")
    Path("slow_backend.py").write_text("import jaxx\n", "utf-8")
    implementation(cast("Any", rl.Policy), "slow")


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
    "changed-contract": _has("MyPolicy.update", Wrong.changed_contract, Whole),
    "changed-parameters": _has("MyPolicy.update", Wrong.changed_parameters, Whole),
    "one-parameter-more": _has("MyPolicy.update", Wrong.one_parameter_more, Whole),
    "no-actor": _has("Counter.count", Wrong.no_actor, object),
    "abstract-role": lambda: _mesh(2, lambda mesh: mesh.spawn(Started)),
    "mesh-shape": lambda: _mesh(4, lambda mesh: mesh.shape(dp=2, tp=3)),
    "no-ranks": lambda: _mesh(0, lambda mesh: mesh),
    "gpus-without-a-cluster": lambda: _mesh(2, lambda mesh: mesh, rl.Resources(gpus=1)),
    "an-instance-is-spawned": lambda: _mesh(1, lambda mesh: mesh.spawn(Worker())),
    "wrong-constructor-arguments": lambda: _mesh(1, lambda mesh: mesh.spawn(Worker, factor=2)),
    "wrong-arguments": lambda: _worker(lambda worker: worker.scaled(BATCH, None, 3)),
    "unknown-endpoint": lambda: _worker(lambda worker: worker.scale(BATCH)),
    "rows-that-are-none": lambda: _worker(lambda worker: worker.scaled(["a", "b"])),
    "misaligned-rows": lambda: _worker(lambda worker: worker.scaled(BATCH, np.ones(3))),
    "rows-that-do-not-come-back": lambda: _worker(lambda worker: worker.fewer(BATCH)),
    "elements-that-do-not-come-back": lambda: _worker(lambda worker: worker.total(BATCH)),
    "ranks-that-disagree": lambda: _worker(lambda worker: worker.index()),
    "rank-that-raises": lambda: _worker(lambda worker: worker.divide(BATCH)),
    "rank-that-writes-its-argument": lambda: _worker(lambda worker: worker.write(BATCH), ranks=1),
    "lock-as-an-argument": lambda: _worker(lambda worker: worker.hold(threading.Lock()), ranks=1),
    "column-that-was-not-loaded": lambda: _worker(_made),
    "weights-that-were-not-loaded": lambda: _worker(_weights, ranks=1),
    "stopped-actor": lambda: _worker(_stopped),
    "each-of-a-stream": lambda: _worker(lambda worker: rl.each(worker.stream)),
    "no-such-rank": lambda: _worker(lambda worker: rl.at(worker, dp=2)),
    "ranks-of-a-plain-object": lambda: rl.ranks(Worker()),
    "unknown-backend": lambda: _spawn(rl.Policy, rl.PolicyConfig(backend="torhc", model="none")),
    "backend-without-the-role": lambda: _spawn(rl.Sampler, rl.SamplerConfig(backend="fsdp", model="none")),
    "own-actor-as-a-role": lambda: _spawn(Memory, RoleConfig(backend="fake")),
}
