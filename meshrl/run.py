"""A run: the engine, the meshes and the folder of one execution of an algorithm script."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pydantic import Field, model_validator

from meshrl.config import Config
from meshrl.data import Batch
from meshrl.engine import INLINE_BYTES, Engine, Resources
from meshrl.engines.local import LocalEngine
from meshrl.errors import ConfigError
from meshrl.mesh import Mesh
from meshrl.metrics import Metrics
from meshrl.recorder import Recorder
from meshrl.registry import implementation
from meshrl.roles import RoleConfig

R = TypeVar("R")


class MeshConfig(Resources):
    """One named mesh: how many ranks, and what each may use."""

    ranks: int = Field(default=1, ge=1)
    axes: dict[str, int] = Field(default={})
    """The axes, the last one fastest; nothing means `dp = ranks`."""

    @model_validator(mode="after")
    def _axes_fit(self) -> Self:
        if self.axes and prod(self.axes.values()) != self.ranks:
            raise ValueError(
                f"the axes {self.axes} multiply to {prod(self.axes.values())}, not to ranks = {self.ranks}"
            )
        return self


class RunConfig(Config):
    """The `[run]` table of a configuration."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """The run's folder is `folder/name`."""
    folder: str = "runs"
    seed: int = 0
    """Decides the order of the data; the roles have seeds of their own."""
    engine: str = Field(default="local", pattern=r"^(local|ray|auto|[\w.-]+:\d+)$")
    """`local`: threads of this process. `ray`: the cluster at RAY_ADDRESS, or one of this machine's own for the run.
    HOST:PORT: the Ray cluster there; `auto`: the one that runs on this machine."""
    inline_bytes: int = Field(default=INLINE_BYTES, ge=0)
    """Columns of more bytes a rank stay on the rank that made them, and are loaded where they are read."""
    meshes: dict[str, MeshConfig] = Field(default={})
    """The meshes that roles name; one that is not here has one rank and the cores that are free."""
    samples_every: int = Field(default=20, ge=1)
    """Steps between two samples of prompts, completions and rewards."""


class Run:
    """What a script is given: spawn roles, count steps, record numbers. Used with `async with`.

    async with Run(RunConfig(name="mine")) as run:
        policy = await run.spawn(Policy, PolicyConfig(model="folder"))
    """

    def __init__(
        self,
        config: RunConfig,
        resolved: Mapping[str, object] | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`resolved`: the whole configuration, which is written to the run's folder."""
        self.config = config
        self.engine = engine or _engine(config)
        self.recorder = Recorder(Path(config.folder) / config.name, resolved or {})
        self._meshes: dict[str, asyncio.Task[Mesh]] = {}
        self._step = 0
        self._step_began = time.perf_counter()

    @property
    def folder(self) -> Path:
        """Where everything that the run writes lies."""
        return self.recorder.folder

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    async def spawn(self, role: Callable[..., R], config: RoleConfig) -> R:
        """The backend that the configuration names for a role, on the mesh that it names.

        Raises `BackendError` where there is none, and what `Mesh.spawn` raises.
        """
        cls = implementation(role, config.backend)
        # A task a mesh, so that roles spawned at the same time wait for one reservation.
        reserving = self._meshes.get(config.mesh)
        if reserving is None or (reserving.done() and (reserving.cancelled() or reserving.exception())):
            reserving = self._meshes[config.mesh] = asyncio.create_task(self._reserve(config.mesh))
        mesh = await asyncio.shield(reserving)
        return await mesh.spawn(cls, config)

    async def mesh(self, ranks: int, resources: Resources | None = None) -> Mesh:
        """Reserve a mesh of one's own; the run stops it at the end."""
        return await Mesh.reserve(self.engine, ranks, resources)

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps, 0 to count - 1, with a progress line."""
        self.recorder.begin(count)
        for step in range(count):
            self._step, self._step_began = step, time.perf_counter()
            yield step

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        """Write the numbers of this step, and now and then rows of the batch to read.

        Loads what it writes of the batch: columns of one value a row, and for samples the texts.
        """
        step, seconds = self._step, time.perf_counter() - self._step_began
        values = {**metrics.means(), **(await _statistics(batch) if batch is not None else {}), **numbers}
        self.recorder.step(step, {**values, "step_s": seconds})
        if batch is not None and step % self.config.samples_every == 0:
            await self.recorder.samples(step, batch)

    def summary(self, **values: float | str) -> None:
        """Add to the run's `summary.json`."""
        self.recorder.summary(**values)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reservation in self._meshes.values():
            reservation.cancel()
        try:
            await self.engine.close()
        finally:
            self.recorder.close(error)

    async def _reserve(self, name: str) -> Mesh:
        config = self.config.meshes.get(name, MeshConfig())
        mesh = await self.mesh(
            config.ranks, Resources.model_validate(config.model_dump(include=set(Resources.model_fields)))
        )
        return mesh.shape(**config.axes) if config.axes else mesh


def _engine(config: RunConfig) -> Engine:
    if config.engine == "local":
        return LocalEngine(inline_bytes=config.inline_bytes)
    try:
        from meshrl.engines.ray import RayEngine  # noqa: PLC0415 -- ray is an extra, and slow to import
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"run.engine = {config.engine!r} needs the package {error.name!r}: pip install 'meshrl[ray]'"
        ) from None
    return RayEngine(None if config.engine == "ray" else config.engine, config.inline_bytes)


async def _statistics(batch: Batch) -> dict[str, float]:
    """The numbers that people watch of a batch of rollouts. Token columns that lie on ranks are left there."""
    if names := [name for name in ("rewards", "truncated", "reward_error") if name in batch]:
        batch = await batch.load(*names)
    found: dict[str, float] = {"rows": len(batch), "tokens": float(batch.lengths.sum())}
    if "loss_mask" in batch and "loss_mask" not in batch.elsewhere and len(batch):
        found["completion_tokens"] = float(batch.loss_mask.values.sum()) / len(batch)
    if "rewards" in batch and len(batch):
        found["reward"] = float(batch.rewards.mean())
    if "truncated" in batch and len(batch):
        found["truncated"] = float(batch.row("truncated").mean())
    if "reward_error" in batch:
        found["reward_errors"] = float(sum(error is not None for error in batch.objects("reward_error")))
    return found
