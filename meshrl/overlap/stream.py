"""Rollouts that run while the policy trains, with a bound on the staleness of the data.

    async with rollouts(sampler, prompts, sampling, ahead=1, score=reward.score) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            ...
            await publish(policy, stream)

`ahead` is the bound, in publications: 0 is the synchronous loop, 1 is one step off-policy, and more is fully
asynchronous.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Final, Self, get_args
from weakref import WeakSet

import numpy as np

from meshrl import log
from meshrl.data import BASE, Batch, Weights, lengths, why_unknown
from meshrl.errors import DataError, described, is_lost
from meshrl.events import Delivery, Pending, gauge, sink
from meshrl.mesh import parts
from meshrl.overlap.producer import GenerateRequest, Producer
from meshrl.overlap.replay import DecisionLog, Opened, schedule
from meshrl.overlap.staleness import Late, StalenessLedger
from meshrl.overlap.stream_state import GroupBuffer, Keep, PromptQueue, Score, StreamState, SwapMode
from meshrl.roles import Sampler, Sampling
from meshrl.tasks import data_cursor

_MOST_FILTERED: Final = 100
"""Batches of groups that `keep` may drop between two delivered batches."""
_WAIT_FOR_DEATH: Final = 5.0
"""Seconds to wait, after a column could not be fetched, for the news that its rank has died."""
_REPORT_AFTER: Final = 60.0
"""Log a wait report after this many seconds without a batch."""


def rollouts(  # noqa: PLR0913 -- what a stream does is chosen in one place
    sampler: Sampler,
    prompts: Iterable[Batch],
    sampling: Sampling,
    *,
    ahead: int = 0,
    score: Score | None = None,
    keep: Keep | None = None,
    late: Late = "wait",
    swap: SwapMode = "in_flight",
    retries: int = 0,
) -> "Rollouts":
    """Start a stream of batches of rollouts. Each has as many groups as the first batch of `prompts` has rows.

    Sampling begins when the first batch is requested. With `ahead=0` a batch equals, bit for bit, the result of
    `rollout` for the same prompts. No row is more than `ahead` publications behind the policy. The column
    `staleness`, int32, has the number for each row. Raises DataError for a negative `ahead`, and for an unknown `late`
    or `swap`.

    - `prompts`: batches with `groups`, a different number for each prompt of the run. In a resumed run,
      pass all prompts again: used ones are skipped, and those that were in progress are sampled again.
    - `score`: called with finished groups, some at a time and several calls at once, as in `score=reward.score`.
    - `keep`: maps scored groups, with all columns loaded except token columns, to bool[rows]. A group with a False is
      dropped and replaced by another prompt (`keep=has_signal`).
    - `late`: whether a batch waits for a group that would be too old for the next one, or such groups are dropped.
    - `swap`: what happens to running rollouts when weights are published.
    - `retries`: how often to repeat rollouts that were lost by a failing sampler. A dead replica is respawned while the
      others continue. On a mesh with `min_ranks`, deaths do not count.
    """
    if ahead < 0:
        raise DataError(f"ahead = {ahead}: the bound is a number of publications, at least 0")
    for name, value, known in (("late", late, get_args(Late)), ("swap", swap, get_args(SwapMode))):
        if value not in known:
            raise DataError(f"{name} = {value!r}: use one of {', '.join(map(repr, known))}")
    queue = PromptQueue(prompts, data_cursor.get())
    ledger = StalenessLedger(queue.size, ahead, late)
    opened = Opened(ledger.size, ahead, sampling.n, late, swap, parts(sampler.generate))
    kept = schedule.get()
    decisions = kept.decisions(sampler, opened) if kept else DecisionLog()
    buffer = GroupBuffer(sampling.n)
    return Rollouts(StreamState(sampler, sampling, swap, retries, score, keep, queue, ledger, buffer, decisions))


@dataclass(eq=False)
class _Ticket:
    """A publication of weights that was announced."""

    counts: bool


class Rollouts:
    """A stream of batches, as `rollouts` returns it: an asynchronous iterator for use with `async with`."""

    live: Final[WeakSet["Rollouts"]] = WeakSet()
    """All open streams."""

    def __init__(self, state: StreamState) -> None:
        self.ledger: StalenessLedger = state.ledger
        self._state = state
        self._prompts, self._buffer = state.prompts, state.buffer
        self._condition, self._decisions = state.condition, state.decisions
        self.producer: Producer = Producer(state)
        self._cursor = data_cursor.get()
        if self._cursor:
            self.ledger.floor = self._cursor.open(self, self.ledger.ahead)
        self._begun = False
        self._swapping = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        """The load that continues after `load` has returned."""
        self._raised: asyncio.Task[None] | None = None
        """The load whose error has been raised, so that the next one may follow."""
        self._announced: list[_Ticket] = []
        self._counted: str | None = None
        """The adapter whose publications are counted, or `BASE`. None before the first one that counts."""
        self._gauges: dict[str, int] = {}
        self._emitted = self.ledger.dropped.copy()
        """Dropped groups that an event has counted."""
        self._filtered = 0
        """Groups that `keep` dropped since the last batch."""

    async def __aenter__(self) -> Self:
        Rollouts.live.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel running rollouts, after the sampler has the newest weights. Raises the error of a load that failed.

        Only an end by force, such as a cancellation, cancels the load too.
        """
        try:
            if self._raised is not self._loading and (error is None or isinstance(error, Exception)):
                await self.loaded()
        except Exception as failed:
            if error is None:
                raise
            log.warning("the sampler could not load the newest weights", error=described(failed))
        finally:
            await self._close()

    async def _close(self) -> None:
        Rollouts.live.discard(self)
        if self._cursor:
            self._cursor.close(self)
        self._condition.fail(DataError("the stream of rollouts is closed: its `async with` has ended"))
        self.producer.replicas.end()
        for task in (tasks := list(self._state.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """Return the next batch. The stream ends with the prompts, and the last batch may be smaller.

        Raises DataError outside the stream's `async with`, or if `parts` has yielded only a part of a batch.
        """
        self.check_whole("the next batch")
        if (batch := await self._next(1)) is not None:
            return batch
        raise StopAsyncIteration("the prompts have ended")

    async def parts(self, most: int) -> AsyncIterator[Batch]:
        """Yield the next batch in at most `most` parts of whole groups, each as soon as its groups are ready.

            async for part in stream.parts(4):
                part = part.assign(advantages=group_advantages(part.rewards, part.groups))
                await policy.forward_backward(part, loss)
            metrics = await policy.step()
            await publish(policy, stream)

        A part has at least `size / most` groups, unless it is the last one, and all that are ready. The bound holds for
        each part as it does for whole batches, and a batch has the same number of groups. If the loop ends early, the
        next one continues with the rest of the batch, which must come before the step ends in a run with checkpoints.
        Nothing is yielded if the prompts have ended. Raises DataError outside the stream's `async with`, or if `most`
        is below 1.
        """
        if most < 1:
            raise DataError(f"a batch cannot come in {most} parts: give a number from 1")
        while (part := await self._next(most)) is not None:
            yield part
            if not self.ledger.taken:
                return
        self.ledger.end_batch()

    async def _next(self, most: int) -> Batch | None:
        """Return the next batch, or the next of at most `most` parts of it. None if the prompts have ended."""
        if self not in Rollouts.live:
            raise DataError("a stream of rollouts can only be used inside its `async with`")
        if not self._begun:
            self._begun = True
            await self._decisions.begin()
            self._state.start(self.producer.run())
            self._state.start(self._collect())
        labels: list[int] = []

        def ready() -> bool:
            if not self._has_failed:
                labels.extend(self._take(most))
            return bool(labels) or self._has_failed or not (self._prompts or self.ledger.groups)

        self.producer.demand = True
        self._condition.notify_all()
        report = asyncio.get_running_loop().call_later(_REPORT_AFTER, _log_waits)
        try:
            await self._condition.wait_for(ready, "trainer", "a batch", self.ledger.why_no_batch)
        finally:
            report.cancel()
            self.producer.demand = False
        if self._has_failed:
            await self.loaded()
        return self._deliver(labels) if labels else None

    def feeds_on(self, sampler: object) -> bool:
        """True if the stream has begun and uses this sampler."""
        return self._begun and self._state.sampler is sampler

    @contextmanager
    def announced(self) -> Generator[None]:
        """Announce that new weights will be passed to `load` before the block ends, as the trainer is already ahead."""
        ticket = _Ticket(self.ledger.announce())
        self._announced.append(ticket)
        try:
            yield
        finally:
            if ticket in self._announced:
                self._announced.remove(ticket)
                self.ledger.withdraw(ticket.counts)

    async def load(self, weights: Weights, then: Callable[[float], None] | None = None) -> None:
        """Give the sampler new weights, as `publish` does, once for each batch.

        With `ahead` of 1 or more and `swap="in_flight"`, it returns at once, and the script continues while the sampler
        loads them: `loaded` waits. It waits itself for weights that are gone with the policy's next update, and in a
        run with a schedule, whose replay needs to know where in the stream they came. `then`: called when the sampler
        has them, with the event log's time at which it began.

        DataError if their version falls. From the first draw on, all are those of one adapter, or the whole model's.
        Raises the error of the load before if that has failed, and the error has not been raised yet.
        """
        async with self._swapping:
            ticket = self._announced.pop(0) if self._announced else _Ticket(self.ledger.announce())
            try:
                if self._raised is not self._loading:
                    await self.loaded()
                if ticket.counts:
                    self._check_adapter(weights)
                self.ledger.check(weights.version)
                await self._condition.wait_for(
                    lambda: self._decisions.is_turn("publish"), "publish", "its turn", lambda: "a schedule is replayed"
                )
            except BaseException:
                self.ledger.withdraw(ticket.counts)
                raise
            self._decisions.note("publish")
            self._loading = None
            if self._overlaps(weights, ticket):
                self._loading = loading = asyncio.create_task(self._swap(weights, ticket, then))
                self._state.tasks.add(loading)
                loading.add_done_callback(self._has_ended)
            else:
                if not self._decisions.is_free:
                    self._condition.notify_all()  # the next draw's call must find these weights
                await self._swap(weights, ticket, then)
            if self._cursor:  # in the step that publishes, even if the sampler is still loading
                self._cursor.publish(self, weights.version, counts=ticket.counts)

    def _overlaps(self, weights: Weights, ticket: _Ticket) -> bool:
        """True if the script continues while the sampler loads these weights."""
        is_apart = bool(self.ledger.ahead) and self._state.swap == "in_flight" and schedule.get() is None
        return is_apart and ticket.counts and weights.lasts and self in Rollouts.live

    async def _swap(self, weights: Weights, ticket: _Ticket, then: Callable[[float], None] | None) -> None:
        began = to.now() if (to := sink.get()) else 0.0
        try:
            self.ledger.arriving = weights.version if ticket.counts else None
            await self.producer.swap(weights)
        except BaseException:
            self.ledger.arriving = None
            self.ledger.withdraw(ticket.counts)
            raise
        if ticket.counts:
            self._counted = BASE if weights.adapter is None else weights.adapter.name
            self.ledger.publish(weights.version)
        if then is not None:
            then(began)
        self._condition.notify_all()

    def _has_ended(self, loading: asyncio.Task[None]) -> None:
        self._state.tasks.discard(loading)
        self._condition.notify_all()  # who waits for a batch raises its error

    @property
    def _has_failed(self) -> bool:
        """True if the last load has failed."""
        loading = self._loading
        return loading is not None and loading.done() and (loading.cancelled() or loading.exception() is not None)

    async def loaded(self) -> None:
        """Wait until the sampler has the weights that were published last.

        Raises the error of a load that failed, until weights are published again, and DataError if the stream was
        closed before.
        """
        if (loading := self._loading) is not None:
            await asyncio.wait([loading])
            if loading.cancelled():
                raise DataError("the stream of rollouts was closed while its sampler loaded weights")
            if loading.exception() is not None:
                self._raised = loading
            loading.result()

    def _check_adapter(self, weights: Weights) -> None:
        """Raise DataError for other weights than those that the stream counts."""
        name = BASE if weights.adapter is None else weights.adapter.name
        counted = name if self._counted is None else self._counted
        if name != counted:
            raise DataError(
                f"weights of {_named(name)} (version {weights.version}) were published to a stream that counts the "
                f"publications of {_named(counted)}: the age of a token is a number of publications, which must all be "
                "of one adapter. Open a stream for each adapter, or publish the others before the stream's first batch"
            )

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of groups that were dropped, by reason: `stale`, or `filtered` by `keep`."""
        return dict(self.ledger.dropped)

    @property
    def waited(self) -> int:
        """Number of full batches that waited for a group that would have been too old for the next one."""
        return self.ledger.waited

    @property
    def unfinished(self) -> Iterable[int]:
        """The `groups` of prompts in progress, which are neither delivered nor dropped."""
        return chain(self.ledger.groups, self._prompts.waiting)

    @property
    def published(self) -> int:
        """Version of the newest weights that the sampler has."""
        return self.ledger.published

    def check_whole(self, before: str) -> None:
        """Raise DataError if only a part of a batch was delivered. `before`: what needs the other parts first."""
        if taken := self.ledger.taken:
            raise DataError(
                f"{taken} of the {self.ledger.size} groups of a batch were delivered in parts: take the others with "
                f"`stream.parts` before {before}"
            )

    def _take(self, most: int) -> list[int]:
        if old := self.ledger.too_old():
            if self.ledger.late == "wait":
                log.warning("groups are too old and are dropped: publish once for each batch", groups=len(old))
            self._drop(old, "stale")
            self._condition.notify_all()
        if self._decisions.is_free:
            return self.ledger.take(rest=not self._prompts, parts=most) or []
        decided, rest = self._decisions.next("deliver"), not self._prompts
        return decided.groups if decided and self.ledger.take_these(decided.groups, rest=rest, parts=most) else []

    def _deliver(self, labels: list[int]) -> Batch:
        self._decisions.note("deliver", groups=labels)
        self._filtered = 0
        batch = self._buffer.batch(labels)
        self._buffer.forget(labels)
        numbers, which = np.unique(batch.row("oldest_version"), return_inverse=True)
        staleness = np.array(self.ledger.staleness(numbers.tolist()), np.int32)[which]
        if self._cursor:
            self._cursor.deliver(self, labels, int(numbers[0]), int(staleness.max()))
        if to := sink.get():
            dropped = self.ledger.dropped - self._emitted
            self._emitted = self.ledger.dropped.copy()
            number = self.ledger.batches - 1
            to.emit(Delivery(number, to.now(), len(batch), np.bincount(staleness).tolist(), dropped))
        self._note_gauges()
        self._condition.notify_all()
        return batch.assign(staleness=staleness)

    def _drop(self, labels: Sequence[int], why: str) -> None:
        self.ledger.drop(labels, why)
        self._buffer.forget(labels)
        if self._cursor:
            self._cursor.drop(self, labels, why)

    async def _collect(self) -> None:
        """Add arriving rows to their groups, and score complete groups while others arrive."""
        producer = self.producer
        while True:
            await self._condition.wait_quietly_for(lambda: bool(producer.arrived))
            arrived, producer.arrived = producer.arrived, []
            complete: dict[int, int] = {}
            for call, replica, rows in arrived:
                if isinstance(rows, Batch) and len(rows):
                    complete |= await self._add(call, replica, rows)
            if complete:
                producer.poison_rows.drawn(complete)
                self._finish(complete)
            for call, replica, ended in arrived:
                if not isinstance(ended, Batch):
                    producer.end(call, replica, ended)
            self._note_gauges()
            self._condition.notify_all()

    async def _add(self, call: GenerateRequest, replica: int, chunk: Batch) -> dict[int, int]:
        """Add rows to their groups, and return the groups that are now complete."""
        rows = await self.producer.read(call, replica, chunk)
        if not len(rows):
            return {}
        aborted = np.asarray(rows.row("aborted"), np.bool_)
        if aborted.any():
            call.aborted.append(rows.select(aborted))
            rows = rows.select(np.logical_not(aborted))
        return self._buffer.add(call.number, rows.drop("aborted"), call.unfinished[replica])

    def _finish(self, complete: Mapping[int, int]) -> None:
        """Score complete groups in a task, drop those that `keep` refuses, and mark the others as ready.

        `complete`: the version of each group's oldest token.
        """
        self._state.start(self._judge(complete, self._buffer.batch(list(complete)), self._buffer.attempts(complete)))

    async def _judge(self, complete: Mapping[int, int], groups: Batch, attempts: Mapping[int, object]) -> None:
        def lost() -> set[int]:
            """Groups that were lost with the sampler in between, and are drawn again."""
            now = self._buffer.attempts(complete)
            return {label for label in complete if now[label] is not attempts[label]}

        try:
            scored = await self._scored(groups)
            unwanted = await self._unwanted(scored)
        except Exception as error:
            if groups.elsewhere and not lost():  # a column may be on a dead rank whose death is unknown
                with suppress(TimeoutError):
                    async with asyncio.timeout(_WAIT_FOR_DEATH):
                        await self._condition.wait_quietly_for(lambda: bool(lost()))
            if not lost() and is_lost(error):  # perhaps lost only for its reader
                self.producer.unread(list(complete), error)
            if not (redrawn := lost()):
                raise
            if rest := {label: oldest for label, oldest in complete.items() if label not in redrawn}:
                self._finish(rest)
            return
        redrawn = lost()
        self._buffer.put(scored.select(np.logical_not(np.isin(scored.groups, list(redrawn)))))
        for label in complete.keys() - unwanted - redrawn:
            self.ledger.finish(label, complete[label])
        self._decisions.check_dropped(unwanted - redrawn)
        self._drop(sorted(unwanted - redrawn), "filtered")
        self._note_gauges()
        self._condition.notify_all()

    async def _scored(self, groups: Batch) -> Batch:
        if self._state.score is None:
            return groups
        scored = await (await self._state.score(groups)).load("groups", "oldest_version")
        if not np.array_equal(scored.groups, groups.groups):
            raise DataError(
                f"`score` was given {len(groups)} rows and returned {len(scored)}, or in another order: return what it "
                "is given, with columns assigned"
            )
        return scored

    async def _unwanted(self, groups: Batch) -> set[int]:
        """Return the groups that `keep` refuses."""
        if self._state.keep is None:
            return set()
        groups = await groups.load(*(name for name, column in groups.stored.items() if lengths(column) is None))
        wanted = np.asarray(self._state.keep(groups), np.bool_)
        unwanted = set(groups.groups[np.logical_not(wanted)].tolist())
        self._filtered += len(unwanted)
        if self._filtered > _MOST_FILTERED * self.ledger.size:
            why = why_unknown(groups)
            raise DataError(
                f"`keep` dropped {self._filtered} groups since the last batch, which needs {self.ledger.size}: groups "
                f"to keep no longer occur. {why or 'Stop here, or choose prompts that are neither solved nor hopeless'}"
            )
        return unwanted

    def _note_gauges(self) -> None:
        now = {"groups ready": self.ledger.ready, "groups running": self.ledger.running}
        for name, value in now.items():
            if self._gauges.get(name) != value:
                gauge(name, value)
        self._gauges = now


def _named(adapter: str) -> str:
    return f"the adapter {adapter!r}" if adapter else "the whole model"


def _log_waits() -> None:
    log.info(f"no batch for {_REPORT_AFTER:g} s: {'; '.join(map(str, Pending.of(asyncio.get_running_loop())))}")
