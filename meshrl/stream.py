"""Rollouts that go on while the policy trains, under a bound on how old what it trains on may be.

    async with rollouts(sampler, prompts, sampling, ahead=1, score=reward.score) as stream:
        for _ in run.steps(config.steps):
            batch = await anext(stream)
            ...
            await publish(policy, stream)

`ahead` is the bound, in published versions: 0 is the synchronous loop, 1 is one step off, more is fully asynchronous.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Never, Self, TypeAlias

import numpy as np
import structlog
from numpy.typing import ArrayLike

from meshrl.assembly import Assembly
from meshrl.data import Batch
from meshrl.errors import DataError, RankDied
from meshrl.events import Delivery, gauge, sink, waiting
from meshrl.handle import respawn
from meshrl.ledger import Late, Ledger
from meshrl.prompts import Prompts
from meshrl.roles import Sampler, Sampling
from meshrl.weights import Weights

Score: TypeAlias = Callable[[Batch], Awaitable[Batch]]
Keep: TypeAlias = Callable[[Batch], ArrayLike]
Swap: TypeAlias = Literal["in_flight", "drain", "abort"]
"""What publishing does to rollouts that run: they go on, with the new weights from their next token; they are finished
first, and none begins meanwhile; or they stop, and go on from where they were with the new weights."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Plan:
    sampler: Sampler
    sampling: Sampling
    score: Score | None
    keep: Keep | None
    swap: Swap


def rollouts(  # noqa: PLR0913 -- what a stream does is chosen in one place
    sampler: Sampler,
    prompts: Iterator[Batch],
    sampling: Sampling,
    *,
    ahead: int = 0,
    score: Score | None = None,
    keep: Keep | None = None,
    late: Late = "wait",
    swap: Swap = "in_flight",
    retries: int = 0,
) -> "Rollouts":
    """A stream of batches of rollouts, each of as many groups as a batch of `prompts` has rows.

    Drawing begins with the first batch that is asked for. With `ahead=0` a batch is, bit for bit, what `rollout` gives
    for the same prompts. No row is given that is more than `ahead` published versions behind the policy. Each row says
    in `staleness`, int32, how many it is.

    `prompts`: batches of one size, with `groups`, another number for each prompt.
    `score`: applied to rows as they finish, as in `score=reward.score`.
    `keep`: from whole groups, scored, to bool[rows]; a group with a False is dropped, and another prompt drawn for it
    (`keep=has_signal`).
    `late`: whether a batch waits for a group that would be too old for the next one, or such groups are dropped.
    `swap`: what publishing does to the rollouts that run.
    `retries`: how often rollouts that a failing sampler lost are drawn again. A sampler that died is respawned.
    """
    if ahead < 0:
        raise DataError(f"ahead = {ahead}: the bound is a number of versions, from 0")
    source = Prompts(prompts)
    return Rollouts(_Plan(sampler, sampling, score, keep, swap), source, Ledger(source.size, ahead, late), retries)


@dataclass(eq=False)
class _Call:
    """One call of `generate`."""

    number: int
    prompts: Batch
    resumed: bool
    """Its rows had begun, and go on: one row each, not `sampling.n`."""
    life: int
    """Which life of the sampler it runs in."""
    aborted: list[Batch] = field(default_factory=list)


class Rollouts:
    """What `rollouts` returns: an asynchronous iterator of batches, used with `async with`."""

    def __init__(self, plan: _Plan, prompts: Prompts, ledger: Ledger, retries: int) -> None:
        self.ledger = ledger
        self._plan = plan
        self._prompts = prompts
        self._retries = retries
        self._assembly = Assembly(plan.sampling.n)
        self._resumable: deque[Batch] = deque()
        self._running: dict[int, _Call] = {}
        self._calls = 0
        self._arrived: list[tuple[_Call, Batch | Exception | None]] = []
        """Rows, and at the end of a call None or what it raised."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._asked = False
        """Whether the trainer waits for a batch."""
        self._halted = 0
        """How many want that no call begins."""
        self._swapping = asyncio.Lock()
        self._reviving = asyncio.Lock()
        self._life = 0
        self._weights: Weights | None = None
        self._told = ledger.dropped.copy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is being generated."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """The next batch. Ends when the prompts do; the last batch may then be smaller."""
        if not self._calls:
            self._start(self._draw())
            self._start(self._collect())
        labels: list[int] = []

        def ready() -> bool:
            labels.extend(self._take())
            return bool(labels or self._error or self._is_over())

        self._asked = True
        self._notify()
        await self._until(ready, "trainer", "a batch", self._why_no_batch)
        self._asked = False
        if labels:
            return self._deliver(labels)
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def load(self, weights: Weights) -> None:
        """Give the sampler new weights, as `publish` does."""
        async with self._swapping:
            life = self._life
            self._weights = weights
            try:
                await self._swap(weights)
            except RankDied as error:
                await self._revive(life, error)
            self.ledger.publish(weights.version)
            self._notify()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that were not delivered, by why: `stale`, or `filtered` by `keep`."""
        return dict(self.ledger.dropped)

    # --- to the trainer ------------------------------------------------------------------------------

    def _take(self) -> list[int]:
        if old := self.ledger.too_old():
            self.ledger.drop(old, "stale")
            self._assembly.forget(old)
            self._notify()
        return self.ledger.take(rest=not self._prompts) or []

    def _is_over(self) -> bool:
        return not self._prompts and not self.ledger.groups

    def _deliver(self, labels: list[int]) -> Batch:
        batch = self._assembly.batch(labels)
        self._assembly.forget(labels)
        numbers, which = np.unique(batch.row("oldest_version"), return_inverse=True)
        staleness = np.array(self.ledger.staleness(numbers.tolist()), np.int32)[which]
        if to := sink.get():
            dropped = self.ledger.dropped - self._told
            self._told = self.ledger.dropped.copy()
            number = self.ledger.batches - 1
            to.emit(Delivery(number, to.now(), len(batch), np.bincount(staleness).tolist(), dropped))
        self._notify()
        return batch.assign(staleness=staleness)

    def _why_no_batch(self) -> str:
        return f"{self.ledger.ready} of {self.ledger.size} groups are ready, {self.ledger.running} run"

    # --- from the sampler ----------------------------------------------------------------------------

    async def _draw(self) -> None:
        """Begin a call of `generate` whenever there is room."""
        while True:
            await self._until(self._may_draw, "rollout", "capacity", self._why_no_capacity)
            if self._resumable:
                prompts, resumed = self._resumable.popleft(), True
            else:
                prompts, resumed = self._prompts.take(self.ledger.room), False
                for label in prompts.groups.tolist():
                    self.ledger.draw(label)
                self._assembly.expect(prompts)
            call = _Call(self._calls, prompts, resumed, self._life)
            self._calls += 1
            self._running[call.number] = call
            self._start(self._generate(call))

    def _may_draw(self) -> bool:
        if self._halted or not (self.ledger.ahead or self._asked):
            return False
        return bool(self._resumable or (self.ledger.room and self._prompts))

    def _why_no_capacity(self) -> str:
        if self._halted:
            return "new weights are on their way to the sampler"
        if not self._prompts:
            return "there are no more prompts"
        if not self._asked and not self.ledger.ahead:
            return "with ahead=0 nothing is drawn before a batch is asked for"
        ledger = self.ledger
        return (
            f"capacity waits for version {ledger.version + 1}: {ledger.capacity} prompts may be drawn by version "
            f"{ledger.version} with ahead={ledger.ahead}, {ledger.accepted} are delivered, {ledger.ready} ready, "
            f"{ledger.running} run"
        )

    async def _generate(self, call: _Call) -> None:
        """Run a call to its end, whatever that is."""
        sampling = self._plan.sampling.model_copy(update={"n": 1}) if call.resumed else self._plan.sampling
        ended: Exception | None = None
        chunks = self._plan.sampler.generate(call.prompts.part(np.arange(len(call.prompts))), sampling)
        try:
            async for chunk in chunks:
                self._arrived.append((call, chunk))
                self._notify()
        except Exception as error:  # noqa: BLE001 -- whatever a sampler raises may be tried again
            ended = error
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
        self._arrived.append((call, ended))
        self._notify()

    async def _collect(self) -> None:
        """Score what has come, all of it at a time, and put it into groups."""
        while True:
            await self._until(lambda: bool(self._arrived), "scoring", "rollouts", self._why_no_batch)
            arrived, self._arrived = self._arrived, []
            await self._add([(call, each) for call, each in arrived if isinstance(each, Batch) and len(each)])
            for call, ended in arrived:
                if not isinstance(ended, Batch):
                    await self._end(call, ended)
            gauge("groups ready", self.ledger.ready)
            gauge("groups running", self.ledger.running)
            self._notify()

    async def _add(self, arrived: list[tuple[_Call, Batch]]) -> None:
        finished: list[tuple[_Call, Batch]] = []
        for call, chunk in arrived:
            aborted = np.asarray(chunk.row("aborted"), np.bool_)
            if aborted.any():
                call.aborted.append(chunk.select(aborted))
            if not aborted.all():
                finished.append((call, chunk.select(np.logical_not(aborted))))
        if not finished:
            return
        rows = Batch.concat([chunk for _, chunk in finished]).drop("aborted")
        if self._plan.score is not None:
            rows = await self._plan.score(rows)
        rows = await rows.load("groups", "oldest_version")
        complete: dict[int, int] = {}
        first = 0
        for call, chunk in finished:
            complete |= self._assembly.add(call.number, rows.select(np.arange(first, first + len(chunk))))
            first += len(chunk)
        unwanted = await self._filtered(list(complete))
        for label in complete.keys() - unwanted:
            self.ledger.finish(label, complete[label])
        self.ledger.drop(unwanted, "filtered")
        self._assembly.forget(unwanted)

    async def _filtered(self, labels: list[int]) -> set[int]:
        """Which of these complete groups `keep` does not want."""
        if self._plan.keep is None or not labels:
            return set()
        batch = await self._assembly.batch(labels).load("rewards", "groups")
        wanted = np.asarray(self._plan.keep(batch), np.bool_)
        return set(batch.groups[np.logical_not(wanted)].tolist())

    async def _end(self, call: _Call, error: Exception | None) -> None:
        """A call is over: what it stopped goes on, what it lost is drawn again."""
        if call.aborted:
            self._resumable.append(Batch.join(call.aborted).drop("aborted"))
        elif error is not None:
            self._lose(call)
            await self._revive(call.life, error)
        else:
            lacking = {label: self._assembly.missing(label) for label in set(call.prompts.groups.tolist())}
            if not call.resumed and any(lacking.values()):
                raise DataError(
                    f"the sampler ended {sum(lacking.values())} rollouts short of {len(call.prompts)} prompts x "
                    f"{self._plan.sampling.n} completions"
                )
        del self._running[call.number]

    # --- weights, failures ---------------------------------------------------------------------------

    async def _swap(self, weights: Weights) -> None:
        sampler = self._plan.sampler
        if self._plan.swap == "in_flight":
            await sampler.load(weights)
            return
        self._halted += 1
        try:
            if self._plan.swap == "abort":
                await sampler.abort()
            await self._until(
                lambda: not self._running, "publish", "the sampler", lambda: f"{len(self._running)} calls run"
            )
            await sampler.load(weights)
        finally:
            self._halted -= 1
            self._notify()

    def _lose(self, call: _Call) -> None:
        """What a call has not completed is drawn again from its prompts."""
        lost = [label for label in dict.fromkeys(call.prompts.groups.tolist()) if self._assembly.missing(label)]
        for label in lost:
            self.ledger.restart(label)
        self._prompts.put_back(self._assembly.lose(lost))

    async def _revive(self, life: int, error: Exception) -> None:
        """After a failure: a sampler that died begins a new life, with the weights that were published last."""
        self._halted += 1
        try:
            async with self._reviving:
                if life != self._life:
                    return  # another call of that life has seen to it
                if not self._retries:
                    raise error
                self._retries -= 1
                self._life += 1
                _log.warning("rollouts were lost and are drawn again", retries_left=self._retries, error=str(error))
                if isinstance(error, RankDied):
                    if self._weights is None:
                        raise error  # nobody here knows the weights it had
                    await respawn(self._plan.sampler)
                    await self._plan.sampler.load(self._weights)
        finally:
            self._halted -= 1
            self._notify()

    # --- waiting -------------------------------------------------------------------------------------

    async def _until(self, ready: Callable[[], bool], who: str, what: str, why: Callable[[], str]) -> None:
        if ready():
            return
        with waiting(who, what, why):
            while not ready():
                await self._changed.wait()

    def _notify(self) -> None:
        """Let everybody who waits look again."""
        self._changed.set()
        self._changed.clear()

    def _start(self, work: Coroutine[Never, Never, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = error
            self._notify()
