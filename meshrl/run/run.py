"""A run: the engine, the meshes and the folder of one execution of an algorithm script."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from meshrl import log
from meshrl.data import Batch, Metrics
from meshrl.errors import ConfigError, DataError, described
from meshrl.events import Event, EventLog, Gauge, Step, clock, sink
from meshrl.mesh import Engine, Mesh, Resources, limited, planned
from meshrl.overlap import CACHE, DIFFERENCE, Loop, Schedule, read_kept_rows, read_schedule, schedule
from meshrl.remote import Remote, connect
from meshrl.roles import (
    ModelConfig,
    Policy,
    PolicyConfig,
    RoleConfig,
    Sampler,
    SamplerConfig,
    Stateful,
    check_axes,
    function_of,
    implementation,
    planner_of,
)
from meshrl.run.background_eval import BackgroundEvaluations, Measurement
from meshrl.run.checkpoints import Checkpoints, Saved, as_json
from meshrl.run.config import MeshConfig, RunConfig
from meshrl.run.engine import engine_of, wait_for_resources
from meshrl.run.folder import changed_schedules, explain_disk_error, restart_warning, was_cut_short
from meshrl.run.health import SPEED, Health, MeshShape, resident_bytes
from meshrl.run.live import Control, Watch
from meshrl.run.lock import FolderLock
from meshrl.run.prometheus import MetricsServer, exposition
from meshrl.run.recorder import Recorder, corrected, statistics
from meshrl.run.samples import Samples
from meshrl.run.trackers import Trackers
from meshrl.tasks import DataCursor, data_cursor

R = TypeVar("R")
S = TypeVar("S", bound=Stateful)


class Steps:
    """The steps of a run: the iterator for `async for` that `Run.steps` returns.

    It is not a generator, because a script that leaves the loop would leave a generator unfinished.
    """

    def __init__(self, numbers: Iterable[int], turn: Callable[[int | None], Awaitable[None]]) -> None:
        """`turn`: called between two steps with the number of the next one, or None after the last."""
        self._numbers = iter(numbers)
        self._turn = turn

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        step = next(self._numbers, None)
        await self._turn(step)
        if step is None:
            raise StopAsyncIteration
        return step


class Run:
    """A run of an algorithm, which spawns roles, counts steps and records numbers. Use it with `async with`.

        async with Run(RunConfig(name="mine")) as run:
            policy = await run.spawn(Policy, PolicyConfig(model="folder"))

    All roles that it has spawned are stopped at the end of the block.
    """

    def __init__(
        self, config: RunConfig, resolved: Mapping[str, object] | None = None, engine: Engine | None = None
    ) -> None:
        """`resolved`: the whole configuration, to be written to the run's folder."""
        self.config = config
        self.engine: Engine = engine or engine_of(config, resolved or {})
        folder = Path(config.folder) / config.name
        self._lock = FolderLock(folder)
        self._events: EventLog | None = None
        self._metrics_server: MetricsServer | None = None
        try:
            if config.metrics_port is not None:
                self._metrics_server = MetricsServer(config.metrics_port, self._exposition)
            self._open(folder, resolved or {})
        except BaseException as error:
            self._lock.release()
            if self._metrics_server:
                self._metrics_server.close()
            if explained := explain_disk_error(error, folder):
                raise explained from error
            raise
        once = self._saved.once.items() if self._saved else ()
        self._once = {name: {key: float(value) for key, value in numbers.items()} for name, numbers in once}
        is_kept = bool(config.checkpoint_every or config.resume)
        self._cursor = DataCursor(self._saved.data if self._saved else None, is_kept=is_kept)
        self._evaluations = BackgroundEvaluations(self.recorder.evaluation)
        self._expects_evaluation = (resolved or {}).get("evaluation") is not None
        self._loops = count()
        self._done = 0
        self._last, self._held_out = -1, -1  # the loop's last step, and steps done before the last rows held out
        self.waits: float = 0.0
        """Seconds to wait for resources for a mesh."""
        self._meshes: dict[str, asyncio.Task[Mesh]] = {}
        self._numbered = count(1)
        self._server: Remote | None = None
        self._sessions, self._connecting = AsyncExitStack(), asyncio.Lock()
        self._loop = self._step = 0
        self._step_began = clock()
        self._stepping = self._worked = False
        self._outer: EventLog | None = None
        self._watch: Watch | None = None
        self._schedule: Schedule | None = None
        self._health, self._counts = Health(), True
        self._learning: set[asyncio.Task[None]] = set()
        self._samples = Samples(config.samples_rows, config.samples_tokens)

    def _open(self, folder: Path, resolved: Mapping[str, object]) -> None:
        config, check = self.config, self._lock.check
        self._trackers = Trackers(config.trackers, config.project)
        # Before the recorder renames the folder, which may be the same.
        self._replayed = read_schedule(Path(config.replay)) if config.replay else None
        self._kept_rows = read_kept_rows(Path(config.replay)) if config.replay else None
        self._checkpoints = Checkpoints(folder, config.checkpoints_kept, config.resume, check)
        self._saved = self._checkpoints.saved
        if self._saved:
            sizes: Mapping[str, int] | None = self._saved.files
            for warning in changed_schedules(folder, resolved):
                log.warning(warning)
        else:
            sizes = {} if config.resume and was_cut_short(folder) else None
            if config.resume and (message := restart_warning(folder, config.checkpoint_every)):
                log.warning(message)
        recorded = resolved or {"run": config.model_dump()}
        self.recorder: Recorder = Recorder(folder, recorded, sizes, check, self._trackers)
        self._control = Control(lambda: self.recorder.folder)

    @property
    def folder(self) -> Path:
        """The folder of all files that the run writes. Reading it renames the folder of an earlier run with its name.

        Raises DataError if another process has taken the folder over, because the caller is about to write there.
        """
        if self._lock.is_held:
            self._lock.check()
        self._settle()
        return self.recorder.folder

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    async def spawn(self, role: Callable[..., R], config: RoleConfig) -> R:
        """Spawn a role with the backend, the mesh and the axes that its configuration names.

        Raises BackendError if there is no such backend, ConfigError if the axes do not fit the mesh's ranks, and the
        errors of `Mesh.spawn`.
        """
        if isinstance(config, ModelConfig) and "seed" not in config.model_fields_set:
            config = config.model_copy(update={"seed": self.seed})
        if isinstance(config, PolicyConfig | SamplerConfig) and self._samples.model is None:
            self._samples.model = config
        if self.config.server and getattr(role, "__name__", "") in ("Policy", "Sampler"):
            return cast("R", await self._at_server(self.config.server, config))
        cls = implementation(role, config.backend)
        check_axes(config, self._mesh_config(config.mesh).ranks)
        self._mesh_config(config.mesh).check_takes(config)
        stateful = isinstance(cls, type) and issubclass(cls, Stateful)
        # Chosen before any await: roles spawned concurrently keep the order of their calls.
        place = self._checkpoints.place(getattr(role, "__name__", cls.__name__)) if stateful else ""
        # One task per mesh: roles spawned concurrently wait for one reservation.
        reserving = self._meshes.get(config.mesh)
        if reserving is None or (reserving.done() and (reserving.cancelled() or reserving.exception())):
            reserving = self._meshes[config.mesh] = asyncio.create_task(self._named_mesh(config.mesh))
        mesh, planner = await asyncio.shield(reserving), await planner_of(config)
        shaped = mesh.shape(**config.axes) if config.axes else mesh
        actor = planned(limited(await shaped.spawn(cls, config), config.timeout), planner)
        self._learn_operations(cls.__name__, config)
        if stateful:
            await self._checkpoints.adopt(place, cast("Stateful", actor))
        return actor

    async def _at_server(self, url: str, config: RoleConfig) -> Policy | Sampler:
        """Return a policy or a sampler at the server."""
        place = self._checkpoints.place("Policy") if isinstance(config, PolicyConfig) else ""
        async with self._connecting:
            if self._server is None:
                key = os.environ.get(self.config.server_key_env, "tml-local")
                self._server = await self._sessions.enter_async_context(connect(url, key))
        if not isinstance(config, PolicyConfig):
            return self._server.sampler()
        policy = await self._server.policy(config)
        await self._checkpoints.adopt(place, policy)
        return policy

    def _learn_operations(self, actor: str, config: RoleConfig) -> None:
        """Learn what utilisation follows from, where it costs little: the model's library is here, or on GPUs."""
        mesh = self._mesh_config(config.mesh)
        is_cheap = self.config.engine == "local" or mesh.gpus > 0
        if is_cheap and isinstance(config, ModelConfig) and function_of(config.backend, "FLOPS"):
            place = MeshShape(config.mesh, mesh.ranks, mesh.gpus)
            task = asyncio.create_task(self._health.learn(actor, config, place))
            self._learning.add(task)
            task.add_done_callback(self._learning.discard)

    async def keep(self, name: str, state: S) -> S:
        """Keep an object of the script, or an actor on a mesh, in checkpoints. Returns it, restored in a resumed run.

            memory = await run.keep("memory", Memory())

        Call it before the loop. `name` is its folder in a checkpoint. Raises DataError if it cannot be kept or a loop
        has begun, and ConfigError if the run resumes from a checkpoint without it.
        """
        return await self._checkpoints.keep(name, state)

    async def mesh(self, ranks: int, resources: Resources | None = None) -> Mesh:
        """Reserve a mesh for your own actors. The run stops it at the end."""
        return await self._reserve(str(next(self._numbered)), ranks, resources)

    def steps(self, count: int) -> AsyncIterator[int]:
        """Iterate over the steps, 0 to count - 1, with a progress line: `async for step in run.steps(400)`.

        Checkpoints are written between two steps when they are due, and after the last step. A resumed run begins after
        its checkpoint, in the loop that had written it, and skips earlier loops. Raises DataError for a count below 0,
        and for steps that do not fit a replayed schedule: fewer steps, more steps if the schedule has weights after the
        loop, or other steps at which weights are published for an evaluation.
        """
        if count < 0:
            raise DataError(f"run.steps({count}): the number of steps must be at least 0")
        loop, first = next(self._loops), 0
        if self._schedule:
            self._schedule.loop(Loop(count, self._evaluations.prepared_every))
        if self._saved and loop <= self._saved.loop:
            first = self._saved.step if loop == self._saved.loop else count
        return Steps(range(first, count), partial(self._turn, loop, first, count))

    async def once(self, name: str, measure: Callable[[], Awaitable[Mapping[str, float]]]) -> Mapping[str, float]:
        """Measure numbers once in a run. A resumed run returns those that were measured before its checkpoint.

            before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))

        Checkpoints keep the numbers under this name.
        """
        if name not in self._once:
            self._once[name] = {key: float(value) for key, value in (await measure()).items()}
        return dict(self._once[name])

    def beside(self, measurement: Measurement) -> None:
        """Measure something at regular steps while the run trains, like `evaluate_during`. The loop awaits it."""
        self._evaluations.measurement = measurement

    async def _turn(self, loop: int, first: int, count: int, step: int | None) -> None:
        """Do what is due between two steps of a loop, where nothing in the script is half-done."""
        after, every = self._stepping, self.config.checkpoint_every
        self._end_step()
        if step is None or (after and every and (self._done + 1) % every == 0):
            await self._cursor.loaded()  # so that a checkpoint's account has what follows from it
        if after:
            self._settle()
            self.recorder.account(self._cursor.account(self._step))
        self._done += after
        await self._checkpoints.settle(wait=step is None)
        if step is None:
            await self._end_loop(loop, first, count, after=after)
            return
        if step == first:
            self._begin_loop(loop, first, count)
        elif after:
            if every and self._done % every == 0:
                await self._checkpoint(loop, step, wait=not self.config.checkpoint_async)
            await self._control.obey(partial(self._checkpoint, loop, step, wait=True) if every else None)
        await self._evaluations.turn(self._done)
        self._loop, self._step, self._step_began, self._stepping = loop, step, clock(), True

    async def _end_loop(self, loop: int, first: int, count: int, *, after: bool) -> None:
        """End a loop after its last step, or if a resumed run has no step left in it."""
        is_resumed = not after and self._saved is not None and loop == self._saved.loop
        if is_resumed:
            self._begin_loop(loop, first, count)
        if after and self.config.checkpoint_every:
            await self._checkpoint(loop, count, wait=True)  # a run with more steps resumes from it
        if after or is_resumed:
            await self._evaluations.turn(self._done)
        await self._evaluations.settle()
        if self._schedule:
            self._schedule.end_loop()

    async def _checkpoint(self, loop: int, step: int, *, wait: bool) -> None:
        await self._evaluations.wait()  # a run that resumes here has its results, and its error is raised after this
        await self._cursor.loaded()
        self.recorder.account(self._cursor.account(None))  # prompts dropped by now count as used
        data = self._cursor.reached()  # before anything else continues
        sizes, once = self.recorder.sizes(), as_json(self._once)
        await self._checkpoints.write(Saved(loop, step, self._done, sizes, once, data, {}), wait=wait)

    def _begin_loop(self, loop: int, first: int, count: int) -> None:
        if self._expects_evaluation and self._evaluations.measurement is None:
            raise ConfigError(
                "[evaluation] is configured, but the script never evaluates during its steps: call "
                "`evaluate_during(run, config.evaluation, ...)` before `run.steps`, or leave the table out"
            )
        self._checkpoints.begin(loop)
        if self._saved and loop == self._saved.loop:
            self._done = self._saved.done
            if first < count:
                log.info(f"{self.recorder.folder} continues after step {first} of {count}")
            else:
                no_more = f"steps = {count} asks for no more; set steps above {first}"
                log.info(f"{self.recorder.folder} has {first} steps already, and {no_more}")
        if self._events:
            self._events.flush()
            self._health.begin(self._events.now())
        self._cursor.begun, self._last = True, count - 1
        self.recorder.begin(count, first)

    def _end_step(self) -> None:
        """Record the end of the open step, if any. If a script leaves the loop, its last step ends with the run."""
        if self._stepping and self._events:
            start = self._events.began
            self._events.emit(Step(self._step, self._step_began - start, clock() - start, self._loop))
            self._events.flush()
        self._stepping = False

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        """Write the numbers of this step, and now and then some rows of the batch as samples.

        It adds numbers of the batch (rows, tokens, reward, staleness, ...) to the means of the metrics, and the
        `effective_sample_size` of a corrected loss. It loads the columns that it writes: some with one value for each
        row, and all those of samples. So samples have what was assigned to the batch before, such as `advantages`.
        """
        step, seconds = self._step, clock() - self._step_began
        stats = await statistics(batch, worked=self._worked) if batch is not None else {}
        self._worked |= stats.get("reward_errors", 0.0) < stats.get("rows", 0.0)
        gauges = self._events.gauges if self._events else {}
        # The distance of the sampler from the policy at the last weight sync.
        synced = {DIFFERENCE: gauges[DIFFERENCE]} if DIFFERENCE in gauges else {}
        values = {**metrics.means(), **corrected(metrics), **stats, **synced, **numbers}
        self._settle()
        used = {CACHE: gauges[CACHE]} if CACHE in gauges else {}
        self.recorder.step(step, {**values, "step_s": seconds}, {**self._note_health(stats), **used})
        if batch is not None and (step % self.config.samples_every == 0 or step == self._last):
            await self._keep_samples(step, batch)

    async def keep_held_out(self, judged: Batch, done: int | None = None) -> None:
        """Write some judged completions of held-out prompts as samples, with the mark `held_out`.

        `judged`: rows as for `record`, with the columns `prompt`, `completion` and `rewards`. None is required: those
        that are missing are not shown. `done`: the number of steps done when the completions began. Default: now.

        There is at most one set for a number of steps: a second one for the same number, or for a smaller one, is
        dropped. If the rows cannot be read, a warning says so, there is no set for this number, and the run continues.
        DataError if another run has taken the folder over.
        """
        step = self._done if done is None else done
        if step > self._held_out:
            self._held_out = step
            await self._keep_samples(step, judged, held_out=True)

    async def _keep_samples(self, step: int, batch: Batch, **mark: bool) -> None:
        """Write some rows of a batch. What cannot be shown is only logged: nothing that is learned depends on it."""
        try:
            found = await self._samples.of(batch)
            hidden = {"held_out", "temperature"} if mark else {"held_out"}  # greedy ones have that of their log-probs
            rows = [{name: row[name] for name in row if name not in hidden} | mark for row in found]
        except Exception as error:  # noqa: BLE001 -- columns and tokenizers are the script's own
            source = f"the evaluation after {step} steps" if mark else f"step {step}"
            log.warning(f"samples.jsonl has no rows of {source}, and the run goes on: {described(error)}")
        else:
            self.recorder.samples(step, rows)

    def _note_health(self, stats: Mapping[str, float]) -> Mapping[str, float]:
        """Record how the machines were used since the last record, as gauges. Returns the speeds."""
        if self._events is None:
            return {}
        self._events.flush()
        rows, each = stats.get("rows"), stats.get("completion_tokens", 0.0 if stats.get("rows") == 0 else None)
        drawn = None if rows is None or each is None else float(rows * each)
        found: Mapping[str, float] = {}
        if self._counts:
            try:
                found = self._health.gauges(self._events.now(), drawn, rows or 0.0, self._events.gauges)
            except Exception as error:  # noqa: BLE001 -- see _count_no_more
                self._count_no_more(error)
        for name, value in found.items():
            self._events.emit(Gauge(name, self._events.now(), value))
        return {name: value for name, value in found.items() if name.startswith(SPEED)}

    def _report_events(self, events: Sequence[Event], began: float) -> None:
        if self._counts:
            try:
                self._health.see(events)
            except Exception as error:  # noqa: BLE001 -- see _count_no_more
                self._count_no_more(error)
        self._trackers.events(events, began)

    def _count_no_more(self, error: Exception) -> None:
        """Leave out speeds and utilisation from now on: a run does not fail because it cannot be measured."""
        self._counts = False
        log.warning(f"speeds and utilisation are left out from now on, and the run goes on: {described(error)}")

    def _exposition(self) -> str:
        """The newest numbers for Prometheus."""
        gauges = self._events.gauges if self._events else {}
        memory = resident_bytes()
        numbers = {**self.recorder.newest, **gauges, **({"memory": float(memory)} if memory else {})}
        return exposition(self.config.name, numbers)

    def _settle(self) -> None:
        """Take the run's folder over, at the first step."""
        self.recorder.settle()
        self._lock.hold()
        if self._events:
            self._events.moved(self.recorder.folder)

    def summary(self, **values: float | str) -> None:
        """Add to the run's `summary.json`."""
        self.recorder.summary(**values)

    async def __aenter__(self) -> Self:
        self._events = EventLog(self.recorder.folder / "events.jsonl", listener=self._report_events)
        self._step_began = self.recorder.began = self._events.began
        if self._metrics_server:
            self._metrics_server.start()
            log.info(f"the numbers of the run are at http://127.0.0.1:{self._metrics_server.port}/metrics")
        self._outer = sink.get()
        sink.set(self._events)
        if self.config.deterministic or self.config.replay:
            self._schedule = Schedule(self.recorder.folder / "schedule.jsonl", self._replayed, self._kept_rows)
        schedule.set(self._schedule)
        data_cursor.set(self._cursor)
        self._watch = Watch(self.config.slow_after, self._events, lambda: self.recorder.folder, self._lock.check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (*self._meshes.values(), *self._learning):
            task.cancel()
        if error is None:  # a script may leave its loop early
            try:
                await self._evaluations.settle()
            except BaseException as failed:  # noqa: BLE001 -- raised below
                error = failed
        explained = explain_disk_error(error, self.recorder.folder) if error else None
        if explained:
            explained.__cause__ = error
        raised = explained or error
        await self._end(raised)
        if raised is not None and (explained or kind is None):
            raise raised

    async def _end(self, error: BaseException | None) -> None:
        with ExitStack() as ends:  # all of them run, even if others raise, the last first
            ends.callback(self._lock.release)
            ends.push(lambda *raised: self._close_files(raised[1] if error is None else error))
            try:
                await self._evaluations.close()
                await self._checkpoints.close(error)
            finally:
                try:
                    await self._sessions.aclose()
                finally:
                    await self.engine.close()

    def _close_files(self, error: BaseException | None) -> None:
        """Close the files. DataError if the disk is full, which is only logged if an error has ended the run."""
        if self._watch:
            self._watch.stop()
        if self._metrics_server:
            self._metrics_server.close()
        rest = self._cursor.account(self._step if self._stepping else None)
        if self._cursor.left_out:
            self.recorder.summary(left_out=self._cursor.left_out)
        if sink.get() is self._events:  # unless the end is in another context than the start
            sink.set(self._outer)
        if data_cursor.get() is self._cursor:
            data_cursor.set(None)
        try:
            with ExitStack() as ends:  # as above
                ends.push(lambda *raised: self.recorder.close(raised[1] if error is None else error, rest))
                if self._schedule:
                    ends.callback(self._schedule.close)
                if self._events:
                    ends.callback(self._events.close)
                self._end_step()
        except OSError as failed:
            what = f"{self.recorder.folder}: the end of the run could not be written: {failed}"
            if error is None:
                raise DataError(f"{what}. Make room on the disk, and run it again, or take it without that") from failed
            log.warning(what)

    async def _named_mesh(self, name: str) -> Mesh:
        config = self._mesh_config(name)
        mesh = await self._reserve(name, config.ranks, config.resources)
        return mesh.shape(**config.axes) if config.axes else mesh

    async def _reserve(self, name: str, ranks: int, resources: Resources | None) -> Mesh:
        logs = str(self.recorder.folder / "logs")
        reserve = partial(Mesh.reserve, self.engine, ranks, resources, name, logs)
        return await wait_for_resources(reserve, name, self.waits)

    def _mesh_config(self, name: str) -> MeshConfig:
        return self.config.meshes.get(name, MeshConfig())
