"""A run for tests: it gives an algorithm the test's roles, and keeps what the algorithm records."""

import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from meshrl.data import Batch, Metrics
from meshrl.engines.local import LocalEngine
from meshrl.errors import BackendError
from meshrl.mesh import Actor, Engine, Mesh, Resources
from meshrl.roles import RoleConfig, Stateful
from meshrl.run import BackgroundMeasurements, Measurement, Run, RunConfig, Steps

R = TypeVar("R")
S = TypeVar("S", bound=Stateful)


class FakeRun(Run):
    """A `Run` without files and progress line: `await algorithm(FakeRun(policy, sampler, reward), config)`.

    `spawn` returns the actor that implements the role, whatever backend the configuration names. Meshes of the run have
    no threads, so it works in virtual time.
    """

    def __init__(self, *actors: Actor, seed: int = 0, engine: Engine | None = None) -> None:
        self.config: RunConfig = RunConfig(seed=seed)
        self.engine: Engine | LocalEngine = engine or LocalEngine()
        self._folder: Path | None = None
        self.actors = actors
        self.recorded: list[dict[str, float]] = []
        """The numbers of each `record`."""
        self.told: dict[str, float | str] = {}
        """The values given to `summary`."""
        self.evaluated: list[dict[str, float]] = []
        """Results of evaluations, with the `step` after which they began."""
        self._beside = BackgroundMeasurements(lambda step, numbers: self.evaluated.append({"step": step, **numbers}))

    @property
    def folder(self) -> Path:
        """A new private folder, which is removed with the run."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="meshrl-fake-run-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    async def spawn(self, role: Callable[..., R], config: RoleConfig) -> R:
        """Return the first actor that is of this role. Raises BackendError if there is none."""
        found = next((actor for actor in self.actors if isinstance(role, type) and isinstance(actor, role)), None)
        if found is None:
            has = ", ".join(type(actor).__name__ for actor in self.actors) or "nothing"
            name = getattr(role, "__name__", str(role))
            raise BackendError(f"the script spawns a {name}, and this FakeRun was given {has}: give it one")
        return cast("R", found)

    async def keep(self, name: str, state: S) -> S:
        """Return the same object. Nothing is kept."""
        return state

    async def mesh(self, ranks: int, resources: Resources | None = None) -> Mesh:
        """Return ranks in the caller's own loop."""
        return await Mesh.reserve(self.engine, ranks, Resources(cpus=0))

    def steps(self, count: int) -> AsyncIterator[int]:
        """Iterate over the steps, 0 to count - 1."""
        return Steps(range(count), lambda step: self._between(count if step is None else step, last=step is None))

    async def _between(self, done: int, *, last: bool) -> None:
        """Begin due evaluations between two steps. Nothing is written."""
        await self._beside.turn(done)
        if last:
            await self._beside.settle()

    def beside(self, measurement: Measurement) -> None:
        """Measure at regular steps."""
        self._beside.add(measurement)

    async def once(self, name: str, measure: Callable[[], Awaitable[Mapping[str, float]]]) -> Mapping[str, float]:
        """Return the measured numbers."""
        return await measure()

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        """Keep the numbers."""
        self.recorded.append({**metrics.means(), **numbers})

    def summary(self, **values: float | str) -> None:
        """Keep the values."""
        self.told |= values

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._beside.close()
        await self.engine.close()
