"""The backend `sim`: roles that compute nothing, but take as much virtual time as real ones.

They keep the roles' contracts for columns and versions. `meshrl simulate` substitutes them for a configuration's
backends. They run only on a `SimEngine`.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple, Self, cast

import numpy as np

from meshrl.algo import Gae, Loss, Predicts, check_predicts, check_sources
from meshrl.data import Batch, LossResult, Metrics, Ragged, Source, Weights
from meshrl.engines.local import LocalEngine, LocalMember, LocalSlot
from meshrl.errors import ConfigError
from meshrl.mesh import Rank, Ref, Resources, Slot, current_rank
from meshrl.planning.pace import CallDurations, Endpoint, Pace, StepSequence
from meshrl.roles import Critic, Policy, Reference, Reward, RoleConfig, Sampling, Step, SteppingSampler

MODELS = "ignored"

ROLES = {name: f"meshrl.planning.backend:Sim{name}" for name in ("Critic", "Policy", "Reference", "Sampler", "Reward")}
"""The roles of the backend `sim`, for the registry."""

_NAMES = ("loss", "lr", "grad_norm", "ratio", "kl", "clip_fraction", "sampler_ratio", "sampler_kl")
"""Metrics of updates, all zero."""


class ProcessorJob(NamedTuple):
    """Work of a rank."""

    ends: float
    """End of the job, on the clock of the processor's service."""
    number: int
    seconds: float
    left: asyncio.Future[float]
    """Set at the end to the share of work left undone: 0 unless it was stopped."""


class Processor:
    """A rank's time, which concurrent jobs share equally: each of k runs at 1/k of the speed."""

    def __init__(self) -> None:
        self._jobs: list[ProcessorJob] = []
        self._numbers = itertools.count()
        self._served = 0.0
        """Seconds of service that a job present from the start would have got."""
        self._seen = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def stop(self, job: ProcessorJob) -> None:
        """Stop a job and leave the rest undone. Does nothing if it has ended."""
        if job.left.done():
            return
        self._advance()
        self._jobs.remove(job)
        heapq.heapify(self._jobs)
        job.left.set_result(max(0.0, job.ends - self._served) / job.seconds)
        self._arm()

    async def work(self, seconds: float, running: set[ProcessorJob]) -> float:
        """Run a job that takes `seconds` alone, and return the share of work left: 0 unless it was stopped.

        The job is in `running` until it ends.
        """
        if seconds <= 0:
            return 0.0
        self._advance()
        left: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        job = ProcessorJob(self._served + seconds, next(self._numbers), seconds, left)
        heapq.heappush(self._jobs, job)
        self._arm()
        running.add(job)
        try:
            return await job.left
        finally:
            running.discard(job)
            self.stop(job)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._jobs:
            self._served += (now - self._seen) / len(self._jobs)
        self._seen = now

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            due = self._seen + max(0.0, self._jobs[0].ends - self._served) * len(self._jobs)
            self._timer = asyncio.get_running_loop().call_at(due, self._end)

    def _end(self) -> None:
        self._advance()
        self._served = max(self._served, self._jobs[0].ends)  # the job is due, despite rounding
        while self._jobs and self._jobs[0].ends <= self._served:
            job = heapq.heappop(self._jobs)
            if not job.left.done():
                job.left.set_result(0.0)
        self._arm()


@dataclass(frozen=True)
class SimTiming:
    """Gives a simulated role the duration of its calls."""

    pace: Pace
    tape: StepSequence
    processors: Sequence[Processor]
    """One processor per rank of the mesh, shared by the roles on it."""
    draws: list[tuple[Endpoint, CallDurations]]
    """What the roles draw from, on all ranks of all meshes."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


class SimEngine(LocalEngine):
    """The local engine, with ranks that use no core and slots with a `Processor`. Nothing is copied."""

    def __init__(self, pace: Pace, seed: int = 0) -> None:
        super().__init__(inline_bytes=None, isolates=False)
        self.tape: StepSequence = StepSequence(pace.steps, seed)
        self._draws: list[tuple[Endpoint, CallDurations]] = []
        self._pace = pace
        self._processors: dict[LocalSlot, Processor] = {}

    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[LocalSlot]:
        """Reserve slots for `count` ranks, whatever resources they ask for."""
        slots = await super().reserve(count, Resources(cpus=0))
        for slot in slots:
            slot.threads = 0  # no cores to record
        self._processors.update((slot, Processor()) for slot in slots)
        return slots

    async def start(
        self,
        slots: Sequence[Slot],
        ranks: Sequence[Rank],
        create: type,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> Sequence[LocalMember]:
        """Construct the actors, and give simulated roles their timing."""
        if issubclass(create, SimRole):
            processors = [self._processors[slot] for slot in cast("Sequence[LocalSlot]", slots)]
            keywords = {**keywords, "timing": SimTiming(self._pace, self.tape, processors, self._draws)}
        return await super().start(slots, ranks, create, arguments, keywords)

    def guessed(self) -> list[str]:
        """The endpoints whose calls had numbers of rows that the record does not cover."""
        if not self._pace.strict:
            return []
        guessed: dict[Endpoint, set[int]] = {}
        for endpoint, draws in self._draws:
            guessed.setdefault(endpoint, set()).update(draws.guessed)
        recorded = {key: {round(work.rows) for work in self._pace.works_of(*key) if work.rows} for key in guessed}
        return [
            f"{role}.{name}: {_span(sizes)} rows on a rank, from {_span(recorded[role, name])}"
            for (role, name), sizes in sorted(guessed.items())
            if sizes
        ]


class SimRole:
    """The base of simulated roles. A `SimEngine` adds their `timing`."""

    role: ClassVar[str]

    def __init__(self, config: RoleConfig, timing: SimTiming | None = None) -> None:
        if timing is None:
            raise ConfigError(
                "backend = 'sim' takes virtual time, which only `meshrl simulate` keeps: it chooses the backend, "
                "for any configuration; to run one without a model, use backend = 'fake'"
            )
        self._timing = timing
        self._rank = current_rank().index
        self._processor = timing.processors[self._rank]
        self._draws: dict[str, CallDurations] = {}

    def _seconds(self, endpoint: str, rows: int | None = None) -> float:
        if endpoint not in self._draws:
            pace = self._timing.pace
            draws = CallDurations(pace.works_of(self.role, endpoint), self._rank, self._timing.tape, pace.beyond)
            self._draws[endpoint] = draws
            self._timing.draws.append(((self.role, endpoint), draws))
        return self._draws[endpoint].next(rows)

    async def _work(self, endpoint: str, rows: int | None = None) -> None:
        await self._processor.work(self._seconds(endpoint, rows), set())


class SimLearner(SimRole):
    """The base of simulated roles that are trained. Simulated runs write no checkpoints."""

    version: int = 0
    """Number of updates."""

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Write nothing."""

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        """Read nothing."""

    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Write nothing."""
        await self._work("save")

    async def _update(self, batch: Batch, loss: Loss, predicts: Predicts) -> None:
        check_predicts(loss, predicts)
        check_sources(batch, loss)
        await self._work("update", len(batch))
        self._stepped()

    def _stepped(self) -> None:
        self.version += 1


class SimPolicy(SimLearner, Policy):
    """A policy whose weights are only a version."""

    role = "Policy"
    _added = 0
    """Rows since the last step."""

    async def encode(self, batch: Batch) -> Batch:
        """Return rows of two tokens: one of the prompt, one of the completion."""
        await self._work("encode", len(batch))
        return batch.assign(**_tokens(len(batch)))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Increment the version. Raises DataError for a critic's loss or another model's log-probs."""
        await self._update(batch, loss, "logprobs")
        return _metrics(len(batch))

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """Return log-probs and losses of zero. As long as an update of the rows, if the record has only updates."""
        check_predicts(loss, "logprobs")
        check_sources(batch, loss)
        await self._work(self._timing.pace.training, len(batch))
        self._added += len(batch)
        zeros = _zeros(batch.tokens, Source.trainer(self.version))
        return LossResult(batch.only().assign(logprobs=zeros, losses=zeros), _metrics(len(batch)))

    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Metrics:
        """Increment the version. It takes no time if the record has only updates."""
        await self._work("step")
        rows, self._added = self._added, 0
        self._stepped()
        return _metrics(rows)

    async def logprobs(self, batch: Batch) -> Batch:
        """Return log-probs of zero."""
        await self._work("logprobs", len(batch))
        return batch.assign(logprobs=_zeros(batch.tokens, Source.trainer(self.version)))

    async def weights(self, adapter: str | None = None) -> Weights:
        """Return weights with a version only."""
        await self._work("weights")
        return Weights(self.version, {})


class SimReference(SimRole, Reference):
    """A reference whose log-probs are zero."""

    role = "Reference"

    async def logprobs(self, batch: Batch) -> Batch:
        """Return log-probs of zero."""
        await self._work("logprobs", len(batch))
        return batch.assign(reference_logprobs=_zeros(batch.tokens, Source("reference")))

    async def load(self, weights: Weights) -> None:
        """Ignore the weights."""
        await self._work("load")


class SimCritic(SimLearner, Critic):
    """A critic whose values, advantages and returns are zero."""

    role = "Critic"

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Return zeros."""
        await self._work("advantages", len(batch))
        zeros = _zeros(batch.tokens)
        return batch.assign(values=zeros, advantages=zeros, returns=zeros)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn nothing. Raises DataError, like every critic, for a policy's loss."""
        await self._update(batch, loss, "values")
        zeros = dict.fromkeys(("value", "return", "value_error", "value_clip_fraction"), (0.0, 1.0))
        return _metrics(len(batch)) | Metrics({**zeros, "return_squared": (1.0, 1.0)})


class SimReward(SimRole, Reward):
    """Rewards of 0 and 1 with equal probability, so that almost all groups have a signal."""

    role = "Reward"

    def __init__(self, config: RoleConfig, timing: SimTiming | None = None) -> None:
        super().__init__(config, timing)
        self._random = np.random.default_rng([self._timing.tape.seed, self._rank])

    async def score(self, batch: Batch) -> Batch:
        """Draw rewards."""
        await self._work("score", len(batch))
        rewards = self._random.integers(0, 2, len(batch)).astype(np.float32)
        scored = batch.assign(rewards=rewards)
        return scored if "reward_error" in batch else scored.assign(reward_error=[None] * len(batch))


class SimSampler(SimRole, SteppingSampler):
    """A sampler whose calls share its rank's time. The rows of a call finish together, at its end.

    `left` of an aborted row, float32, is the share of its time that remains.
    """

    role = "Sampler"

    def __init__(self, config: RoleConfig, timing: SimTiming | None = None) -> None:
        super().__init__(config, timing)
        self._version = 0
        self._latency = CallDurations(self._timing.pace.latency, 0, self._timing.tape)
        self._jobs: set[ProcessorJob] = set()
        """Running calls of `generate`."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield all rows at once, after their duration."""
        rows = (await _light(prompts)).repeat(sampling.n)
        share = float(rows.row("left").mean()) if "left" in rows and len(rows) else 1.0
        async with self.generate_calls.begin(sampling.beside) as call:
            version = self._version
            left = 1.0
            if await call.step():
                left = await self._processor.work(share * self._seconds("generate", len(rows)), self._jobs)
            if not left:
                await asyncio.sleep(self._latency.next(None))
        yield self._rollouts(rows, version, sampling, left * share)

    async def load(self, weights: Weights) -> Batch:
        """Take the version."""
        await self._work("load")
        async with self.generate_calls.loading() as places:
            self._version = weights.version
        return places

    async def abort(self) -> None:
        """End the running calls where they are."""
        await self._work("abort")
        await super().abort()
        for job in list(self._jobs):
            self._processor.stop(job)

    def _rollouts(self, rows: Batch, version: int, sampling: Sampling, left: float) -> Batch:
        count = len(rows)
        columns = _tokens(count)
        oldest = rows.row("oldest_version") if "left" in rows else np.full(count, version, np.int32)
        mask = columns["loss_mask"]
        return rows.assign(
            **columns,
            sampler_logprobs=_zeros(columns["tokens"], Source("sampler")),
            versions=Ragged(np.where(mask.values, np.repeat(oldest, 2), -1).astype(np.int32), mask.offsets),
            oldest_version=oldest,
            temperature=np.full(count, sampling.temperature or 1.0, np.float32),
            truncated=np.zeros(count, np.bool_),
            aborted=np.full(count, left > 0),
            left=np.full(count, left, np.float32),
        )


class _LocalRef(Ref):
    """A reference that holds its value itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        return [each.value for each in cast("Sequence[_LocalRef]", held)]


async def _light(prompts: Batch) -> Batch:
    """The prompts with completions. Python values are replaced by row numbers, because they cost most to send."""
    arrays = {name: column for name in prompts.names if isinstance(column := prompts[name], np.ndarray)}
    texts = prompts.drop(*arrays).assign(completion=[""] * len(prompts), reward_error=[None] * len(prompts))
    return (await texts.hold(_LocalRef, -1).load()).assign(**arrays)


def _span(sizes: Collection[int]) -> str:
    """The range of some numbers."""
    low, high = min(sizes), max(sizes)
    return f"{low}" if low == high else f"{low} to {high}"


@cache
def _tokens(rows: int) -> Mapping[str, Ragged]:
    """Rows of two tokens: one of the prompt, one of the completion."""
    offsets = np.arange(0, 2 * rows + 1, 2)
    tokens = Ragged(np.zeros(2 * rows, np.int32), offsets)
    return {"tokens": tokens, "loss_mask": Ragged(np.tile([False, True], rows), tokens.offsets)}


def _zeros(like: Ragged, source: Source | None = None) -> Ragged:
    return Ragged(np.zeros(len(like.values), np.float32), like.offsets, source=source)


def _metrics(rows: int) -> Metrics:
    return Metrics({"rows": (rows, 1.0), "tokens": (2 * rows, 1.0), **dict.fromkeys(_NAMES, (0.0, 1.0))})
