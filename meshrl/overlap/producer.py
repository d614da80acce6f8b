"""Keeps a sampler busy: calls `generate` when there is room, and passes on new weights."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Literal, Never, TypeAlias

import numpy as np

from meshrl.data import Batch, Weights
from meshrl.errors import DataError
from meshrl.mesh import Rows, parts, streams
from meshrl.overlap.condition import Condition
from meshrl.overlap.grouping import GroupBuffer
from meshrl.overlap.prompt_queue import PromptQueue
from meshrl.overlap.replay import Decision, DecisionLog, load_into
from meshrl.overlap.replicas import Life, Replicas
from meshrl.overlap.routing import NOWHERE, Router, Share
from meshrl.overlap.staleness import StalenessLedger
from meshrl.overlap.suspects import Suspects
from meshrl.roles import ResumingSampler, Sampler, Sampling

SwapMode: TypeAlias = Literal["in_flight", "drain", "abort"]
"""The effect of a publication on running rollouts. `in_flight`: they use the new weights from the next token. `drain`:
they finish first, and none starts before. `abort`: they stop, and continue with the new weights."""

_LOT = 8
"""While calls run, a new one starts once this fraction of a batch has room, because many small calls decode slowly."""


@dataclass(eq=False)
class GenerateRequest:
    """One call of `generate`, which each replica answers separately."""

    number: int
    prompts: Batch
    sampling: Sampling
    owners: Rows
    """The replica of each row."""
    given: Mapping[int, Share]
    """The outstanding rows of each group, by replica."""
    several: bool
    """True if there are several replicas. A single one may divide its rows itself."""
    lives: dict[int, Life] = field(default_factory=dict)
    """The life in which each unfinished replica started it."""
    began: frozenset[Life] = frozenset()
    """The lives of all replicas that it was sent to."""
    aborted: list[Batch] = field(default_factory=list)
    """Its unfinished rows."""
    lost: set[int] = field(default_factory=set)
    """Groups that are sampled again, whose other rows are dropped."""
    unread: dict[int, Exception] = field(default_factory=dict)
    """By replica, why rows from there could not be read."""

    def labels(self, replica: int) -> list[int]:
        """Return the labels of its groups on a replica, without lost ones."""
        return [label for label, _ in self.shares(replica) if label not in self.lost]

    def shares(self, replica: int) -> list[tuple[int, Share]]:
        """Return the shares of a replica."""
        return [each for each in self.given.items() if not self.several or each[1].replica == replica]

    def check(self, replica: int) -> None:
        """Raise DataError if a replica ended without an error, but with missing or extra rows."""
        missing = sum(share.rows for label, share in self.shares(replica) if label not in self.lost)
        prompts = int((self.owners == replica).sum()) if self.several else len(self.prompts)
        if missing:
            raise DataError(
                f"the sampler returned {prompts * self.sampling.n - missing} rollouts for {prompts} prompts x "
                f"{self.sampling.n} completions"
            )


@dataclass(frozen=True)
class StreamState:
    """The shared state of both sides of a stream."""

    ledger: StalenessLedger
    buffer: GroupBuffer
    prompts: PromptQueue
    condition: Condition
    decisions: DecisionLog
    start: Callable[[Coroutine[Never, Never, None]], None]
    """Run a task until the stream ends. If it fails, the stream fails."""


class Producer:
    """The side of a stream that controls the sampler."""

    def __init__(self, sampler: Sampler, sampling: Sampling, swap: SwapMode, retries: int, state: StreamState) -> None:
        self.arrived: list[tuple[GenerateRequest, int, Batch | Exception | None]] = []
        """Rows that arrived from a replica. At the end of a call, None or its exception."""
        self.demand = False
        """True if the trainer waits for a batch."""
        self.sampler = sampler
        self._sampling = sampling
        self._mode = swap
        self._state = state
        self.replicas: Replicas = Replicas(sampler, retries, state.condition, state.start, self._changed)
        self.suspects: Suspects = Suspects()
        self._router = Router(parts(sampler.generate))
        self._resumable: dict[int, tuple[Batch, GenerateRequest]] = {}
        """Aborted rows and their call, by its number. They continue in this order, whichever call ended first."""
        self._running: dict[int, GenerateRequest] = {}
        self._calls = 0
        self._halted = 0
        """Number of tasks that let no call start."""

    async def run(self) -> None:
        """Start calls whenever there is room."""
        it = self._state
        self.replicas.begin()
        while True:
            await it.condition.wait_for(self._may_draw, "rollout", "capacity", self._why_not)
            decided, before = it.decisions.next("draw"), NOWHERE
            if self._resumable:
                prompts, aborted = self._resumable.pop(min(self._resumable))
                before = aborted.given
                sampling = self._sampling.model_copy(update={"n": 1})
            else:
                prompts, sampling = it.prompts.take(decided.count if decided else it.ledger.room), self._sampling
                for label in prompts.groups.tolist():
                    it.ledger.draw(label)
                it.buffer.expect(prompts)
            call = self._request(prompts, sampling, before, decided)
            it.decisions.note("draw", len(prompts), owners=call.owners.tolist() if self._router.replicas > 1 else [])
            if decided:
                it.condition.notify_all()  # the trainer may be next
            chunks = streams(self.sampler.generate, call.owners)(prompts.part(np.arange(len(prompts))), sampling)
            call.lives = {replica: self.replicas.life(replica) for replica in chunks}
            call.began = frozenset(call.lives.values())
            for replica, rows in chunks.items():
                it.start(self._generate(call, replica, rows))

    async def swap(self, weights: Weights) -> None:
        """Give the sampler new weights, in the mode of this stream."""
        if self._mode == "in_flight":
            await load_into(self.sampler, weights, self.replicas.load)
            return
        resuming = self.sampler if self._mode == "abort" and isinstance(self.sampler, ResumingSampler) else None
        self._halted += 1
        try:
            if self._mode == "abort":
                await self.replicas.abort()
            if resuming is None:
                await self._state.condition.wait_for(
                    lambda: not self._running, "publish", "the sampler", lambda: f"{len(self._running)} calls run"
                )
            await load_into(self.sampler, weights, self.replicas.load)
        except BaseException:
            if resuming is not None:  # the load may not have been reached
                await resuming.resume()
            raise
        finally:
            self._halted -= 1
            self._state.condition.notify_all()

    async def read(self, call: GenerateRequest, replica: int, chunk: Batch) -> Batch:
        """Read arrived rows of a call. Returns the wanted ones, with the columns that the stream reads."""
        own = ("max_tokens",) if "max_tokens" in chunk else ()
        try:
            rows = await chunk.load("groups", "aborted", "oldest_version", *own)
        except Exception as error:  # noqa: BLE001 -- its rank is gone: the call's end says why, or raises this
            call.unread[replica] = error
            return chunk.select(np.zeros(0, np.int64))
        self._router.take(call.given, rows.groups.tolist())
        self.replicas.came(replica)
        return rows.select(np.logical_not(np.isin(rows.groups, list(call.lost)))) if call.lost else rows

    def end(self, call: GenerateRequest, replica: int, error: Exception | None) -> None:
        """Finish a call on a replica, after its rows are counted. Lost groups are sampled again.

        Once all replicas have finished, aborted rows continue.
        """
        if error := error or call.unread.get(replica):
            self.replicas.failed(call.lives[replica], error)
            self._lose(self._state.buffer.incomplete(call.labels(replica)))
        else:
            call.check(replica)
        self._router.end(share for _, share in call.shares(replica))
        del call.lives[replica]
        if not call.lives:
            del self._running[call.number]
            if call.aborted:
                rows = Batch.join(call.aborted).drop("aborted")
                self._resume(rows.select(np.logical_not(np.isin(rows.groups, list(call.lost)))), call)
        self._state.condition.notify_all()

    def unread(self, labels: list[int], error: Exception) -> None:
        """Sample groups again whose columns cannot be fetched, although no replica is known to have died."""
        self.replicas.unread(error)
        self._state.decisions.break_off("rows were lost on their way and drawn again")
        self._lose(labels)
        self._state.condition.notify_all()

    def _may_draw(self) -> bool:
        it = self._state
        # The synchronous loop samples nothing before a batch is requested, not even after the last step.
        if (
            self._halted
            or not self.replicas.are_enough
            or not it.decisions.is_turn("draw")
            or not (it.ledger.ahead or self.demand)
        ):
            return False
        decided = it.decisions.next("draw")
        least = decided.count if decided else max(1, it.ledger.size // _LOT) if self._running else 1
        return bool(self._resumable or (it.ledger.room >= least and it.prompts))

    def _why_not(self) -> str:
        ledger = self._state.ledger
        if self._halted:
            return "new weights are on their way to the sampler"
        if not self.replicas.are_enough:
            return self.replicas.why_not()
        if not self._state.prompts:
            return "there are no more prompts"
        if not self.demand and not ledger.ahead:
            return "with ahead=0 nothing is drawn before a batch is asked for"
        return (
            f"capacity waits for version {ledger.version + 1}: with ahead={ledger.ahead}, {ledger.capacity} prompts "
            f"may be drawn by version {ledger.version}; {ledger.delivered} are delivered, {ledger.ready} ready, "
            f"{ledger.running} run"
        )

    def _request(
        self, prompts: Batch, sampling: Sampling, before: Mapping[int, Share], decided: Decision | None
    ) -> GenerateRequest:
        several = len(self.replicas.each) > 1
        here = self.replicas.here if several else np.arange(self._router.replicas)
        owners = np.array(decided.owners if decided else [], np.int64)
        if not len(owners) or not np.isin(owners, here).all():
            owners = self._router.divide(prompts, sampling, before, here)
        given = self._router.give(prompts, sampling, owners)
        call = GenerateRequest(self._calls, prompts, sampling, owners, given, several)
        self._calls += 1
        self._running[call.number] = call
        return call

    async def _generate(self, call: GenerateRequest, replica: int, chunks: AsyncIterator[Batch]) -> None:
        """Run a call on a replica to its end, or its failure."""
        ended: Exception | None = None
        try:
            async for chunk in chunks:
                self.arrived.append((call, replica, chunk))
                self._state.condition.notify_all()
        except Exception as error:  # noqa: BLE001 -- anything that a sampler raises may be retried
            ended = error
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
        self.arrived.append((call, replica, ended))
        self._state.condition.notify_all()

    def _changed(self, why: str, death: tuple[Life, Exception] | None) -> None:
        """Handle a change of replicas. The unfinished and held rows of a life that ended are lost."""
        self._state.decisions.break_off(why)
        if death is None:
            return
        life, error = death
        drawing: list[int] = []
        for call in self._running.values():
            if call.lives.get(life[0]) == life:
                drawing += self._state.buffer.incomplete(call.labels(life[0]))
        self.suspects.died(life[0], self._state.buffer.prompts(drawing), error)
        lost = [*self._state.buffer.elsewhere(life), *drawing]
        for rows, call in self._resumable.values():
            if rows.elsewhere and life in call.began:
                lost += [label for label in call.labels(life[0]) if label in rows.groups]
        self._lose(list(dict.fromkeys(lost)))

    def _lose(self, labels: list[int]) -> None:
        """Sample groups again, from their prompts. Rows of them that still arrive are dropped."""
        it = self._state
        if not labels:
            return
        for label in labels:
            it.ledger.restart(label)
        it.prompts.put_back(it.buffer.lose(labels))
        for call in self._running.values():
            call.lost.update(call.given.keys() & set(labels))
        for number, (rows, call) in list(self._resumable.items()):
            del self._resumable[number]
            self._resume(rows.select(np.logical_not(np.isin(rows.groups, labels))), call)

    def _resume(self, rows: Batch, call: GenerateRequest) -> None:
        """Let these rows of a call continue later."""
        if len(rows):
            self._resumable[call.number] = rows, call
