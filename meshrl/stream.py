"""Rollouts that go on while the policy trains, under a bound on how old what it trains on may be.

    async with rollouts(sampler, prompts, sampling, ahead=1, score=reward.score) as stream:
        for _ in run.steps(config.steps):
            batch = await anext(stream)
            ...
            await publish(policy, stream)

`ahead` is the bound, in published versions: 0 is the synchronous loop, 1 is one step off, more is fully asynchronous.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Never, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshrl.assembly import Assembly
from meshrl.changes import Changes
from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.events import Delivery, gauge, sink
from meshrl.generation import Call, Generation, Shared, Swap
from meshrl.ledger import Late, Ledger
from meshrl.prompts import Prompts
from meshrl.roles import Sampler, Sampling
from meshrl.schedule import Script, schedule
from meshrl.weights import Weights

Score: TypeAlias = Callable[[Batch], Awaitable[Batch]]
Keep: TypeAlias = Callable[[Batch], ArrayLike]

_MOST_FILTERED: Final = 100
"""Batches of groups that `keep` may drop between two batches."""


@dataclass(frozen=True)
class _Plan:
    sampler: Sampler
    sampling: Sampling
    swap: Swap
    retries: int
    score: Score | None
    keep: Keep | None


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
    `score`: applied to groups as they finish, as in `score=reward.score`.
    `keep`: from such groups, scored, to bool[rows]; one with a False is dropped, and another prompt drawn for it
    (`keep=has_signal`).
    `late`: whether a batch waits for a group that would be too old for the next one, or such groups are dropped.
    `swap`: what publishing does to the rollouts that run.
    `retries`: how often rollouts that a failing sampler lost are drawn again. A sampler that died is respawned.
    """
    if ahead < 0:
        raise DataError(f"ahead = {ahead}: the bound is a number of versions, from 0")
    source = Prompts(prompts)
    return Rollouts(_Plan(sampler, sampling, swap, retries, score, keep), source, Ledger(source.size, ahead, late))


class Rollouts:
    """What `rollouts` returns: an asynchronous iterator of batches, used with `async with`."""

    def __init__(self, plan: _Plan, prompts: Prompts, ledger: Ledger) -> None:
        self.ledger = ledger
        self._plan = plan
        self._prompts = prompts
        self._assembly = Assembly(plan.sampling.n)
        self._changes = Changes()
        kept = schedule.get()
        self._script = kept.script() if kept else Script()
        shared = Shared(ledger, self._assembly, prompts, self._changes, self._script, self._start)
        self._generation = Generation(plan.sampler, plan.sampling, plan.swap, plan.retries, shared)
        self._begun = False
        self._swapping = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = ledger.dropped.copy()
        self._filtered = 0
        """Groups that `keep` dropped since the last batch."""

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
        if not self._begun:
            self._begun = True
            self._start(self._generation.run())
            self._start(self._collect())
        labels: list[int] = []

        def ready() -> bool:
            labels.extend(self._take())
            return bool(labels or self._is_over())

        self._generation.demand = True
        self._changes.tell()
        await self._changes.until(ready, "trainer", "a batch", self._why_no_batch)
        self._generation.demand = False
        if labels:
            return self._deliver(labels)
        raise StopAsyncIteration

    async def load(self, weights: Weights) -> None:
        """Give the sampler new weights, as `publish` does."""
        async with self._swapping:
            await self._changes.until(
                lambda: self._script.is_turn("publish"), "publish", "its turn", lambda: "a schedule is replayed"
            )
            self._script.note("publish")
            await self._generation.swap(weights)
            self.ledger.publish(weights.version)
            self._changes.tell()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that were not delivered, by why: `stale`, or `filtered` by `keep`."""
        return dict(self.ledger.dropped)

    # --- to the trainer ------------------------------------------------------------------------------

    def _take(self) -> list[int]:
        if old := self.ledger.too_old():
            self.ledger.drop(old, "stale")
            self._assembly.forget(old)
            self._changes.tell()
        if self._script.is_free:
            return self.ledger.take(rest=not self._prompts) or []
        decided = self._script.next("deliver")
        return decided.groups if decided and self.ledger.take_these(decided.groups) else []

    def _deliver(self, labels: list[int]) -> Batch:
        self._script.note("deliver", groups=labels)
        self._filtered = 0
        batch = self._assembly.batch(labels)
        self._assembly.forget(labels)
        numbers, which = np.unique(batch.row("oldest_version"), return_inverse=True)
        staleness = np.array(self.ledger.staleness(numbers.tolist()), np.int32)[which]
        if to := sink.get():
            dropped = self.ledger.dropped - self._told
            self._told = self.ledger.dropped.copy()
            number = self.ledger.batches - 1
            to.emit(Delivery(number, to.now(), len(batch), np.bincount(staleness).tolist(), dropped))
        self._changes.tell()
        return batch.assign(staleness=staleness)

    def _is_over(self) -> bool:
        return not self._prompts and not self.ledger.groups

    def _why_no_batch(self) -> str:
        return f"{self.ledger.ready} of {self.ledger.size} groups are ready, {self.ledger.running} run"

    # --- from the sampler ----------------------------------------------------------------------------

    async def _collect(self) -> None:
        """Score what has come, all of it at a time, and put it into groups."""
        generation = self._generation
        while True:
            await self._changes.until(
                lambda: bool(generation.arrived), "scoring", "rollouts", lambda: f"{self.ledger.running} groups run"
            )
            arrived, generation.arrived = generation.arrived, []
            await self._add([(call, each) for call, each in arrived if isinstance(each, Batch) and len(each)])
            for call, ended in arrived:
                if not isinstance(ended, Batch):
                    self._check(call, ended)
                    await generation.end(call, ended)
            gauge("groups ready", self.ledger.ready)
            gauge("groups running", self.ledger.running)
            self._changes.tell()

    async def _add(self, arrived: list[tuple[Call, Batch]]) -> None:
        """Put rows to their groups; score those that are whole now."""
        whole: dict[int, int] = {}
        for call, chunk in arrived:
            rows = await chunk.load("groups", "aborted", "oldest_version")
            aborted = np.asarray(rows.row("aborted"), np.bool_)
            if aborted.any():
                call.aborted.append(rows.select(aborted))
                rows = rows.select(np.logical_not(aborted))
            whole |= self._assembly.add(call.number, rows.drop("aborted"))
        if not whole:
            return
        groups = self._assembly.batch(list(whole))
        if self._plan.score is not None:
            groups = await (await self._plan.score(groups)).load("groups", "oldest_version")
        self._assembly.put(groups)
        unwanted = await self._unwanted(groups)
        for label in whole.keys() - unwanted:
            self.ledger.finish(label, whole[label])
        self.ledger.drop(unwanted, "filtered")
        self._assembly.forget(unwanted)

    async def _unwanted(self, groups: Batch) -> set[int]:
        """Which of these groups `keep` does not want."""
        if self._plan.keep is None:
            return set()
        groups = await groups.load(*({"rewards", "groups"} & set(groups.names)))
        wanted = np.asarray(self._plan.keep(groups), np.bool_)
        unwanted = set(groups.groups[np.logical_not(wanted)].tolist())
        self._filtered += len(unwanted)
        if self._filtered > _MOST_FILTERED * self.ledger.size:
            raise DataError(
                f"`keep` dropped {self._filtered} groups since the last batch, which needs {self.ledger.size}: what it "
                "keeps does not come any more. Stop there, or take prompts that are neither solved nor hopeless"
            )
        return unwanted

    def _check(self, call: Call, error: Exception | None) -> None:
        """DataError where a call ended well and lacks rows."""
        lacking = [self._assembly.missing(label) for label in set(call.prompts.groups.tolist())]
        if error is None and not call.aborted and not call.resumed and any(lacking):
            raise DataError(
                f"the sampler ended {sum(lacking)} rollouts short of {len(call.prompts)} prompts x "
                f"{self._plan.sampling.n} completions"
            )

    # --- tasks ---------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Never, Never, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._changes.fail(error)
