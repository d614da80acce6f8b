"""Keeps a sampler busy: calls `generate` when there is room, and passes on new weights."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshrl.data import Batch, Weights
from meshrl.errors import DataError
from meshrl.mesh import Rows, parts, streams
from meshrl.overlap.replay import Decision, load_into
from meshrl.overlap.replicas import Incarnation, PoisonRows, Replicas
from meshrl.overlap.routing import NOWHERE, Router, Share
from meshrl.overlap.stream_state import StreamState
from meshrl.roles import ResumingSampler, Sampling

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
    shares: Mapping[int, Share]
    """The outstanding rows of each group, by replica."""
    several: bool
    """True if there are several replicas. A single one may divide its rows itself."""
    unfinished: dict[int, Incarnation] = field(default_factory=dict)
    """The incarnation in which each unfinished replica started it."""
    incarnations: frozenset[Incarnation] = frozenset()
    """Those of all replicas that it was sent to."""
    aborted: list[Batch] = field(default_factory=list)
    """Its unfinished rows."""
    lost: set[int] = field(default_factory=set)
    """Groups that are sampled again, whose other rows are dropped."""
    unread: dict[int, Exception] = field(default_factory=dict)
    """Read errors by replica."""

    def labels(self, replica: int) -> list[int]:
        """Return the labels of its groups on a replica, without lost ones."""
        return [label for label, _ in self.shares_of(replica) if label not in self.lost]

    def shares_of(self, replica: int) -> list[tuple[int, Share]]:
        """Return the shares of a replica."""
        return [each for each in self.shares.items() if not self.several or each[1].replica == replica]

    def check(self, replica: int) -> None:
        """Raise DataError if a replica ended without an error, but with missing or extra rows."""
        missing = sum(share.rows for label, share in self.shares_of(replica) if label not in self.lost)
        prompts = int((self.owners == replica).sum()) if self.several else len(self.prompts)
        if missing:
            raise DataError(
                f"the sampler returned {prompts * self.sampling.n - missing} rollouts for {prompts} prompts x "
                f"{self.sampling.n} completions"
            )


class Producer:
    """The side of a stream that controls the sampler."""

    def __init__(self, state: StreamState) -> None:
        self.arrived: list[tuple[GenerateRequest, int, Batch | Exception | None]] = []
        """Rows that arrived from a replica. At the end of a call, None or its exception."""
        self.demand = False
        """True if the trainer waits for a batch."""
        self._state = state
        self.replicas: Replicas = Replicas(state, self._changed)
        self.poison_rows: PoisonRows = PoisonRows()
        self._router = Router(parts(state.sampler.generate))
        self._resumable: dict[int, tuple[Batch, GenerateRequest]] = {}
        """Aborted rows and their call, by its number. They continue in this order, whichever call ended first."""
        self._running: dict[int, GenerateRequest] = {}
        self._calls = 0
        self._halted = 0
        """Number of tasks that currently block new `generate` calls."""

    async def run(self) -> None:
        """Start calls whenever there is room."""
        state = self._state
        self.replicas.begin()
        while True:
            await state.condition.wait_for(self._may_draw, "rollout", "capacity", self._why_not)
            decided, before = state.decisions.next("draw"), NOWHERE
            if self._resumable:
                prompts, aborted = self._resumable.pop(min(self._resumable))
                before = aborted.shares
                sampling = state.sampling.model_copy(update={"n": 1})
            else:
                prompts, sampling = state.prompts.take(decided.count if decided else state.ledger.room), state.sampling
                for label in prompts.groups.tolist():
                    state.ledger.draw(label)
                state.buffer.expect(prompts)
            call = self._request(prompts, sampling, before, decided)
            state.decisions.note("draw", len(prompts), owners=call.owners.tolist() if self._router.replicas > 1 else [])
            if decided:
                state.condition.notify_all()  # the trainer may be next
            chunks = streams(state.sampler.generate, call.owners)(prompts.part(np.arange(len(prompts))), sampling)
            call.unfinished = {replica: self.replicas.incarnation(replica) for replica in chunks}
            call.incarnations = frozenset(call.unfinished.values())
            for replica, rows in chunks.items():
                state.start(self._generate(call, replica, rows))

    async def swap(self, weights: Weights) -> None:
        """Give the sampler new weights, in the mode of this stream."""
        sampler, mode = self._state.sampler, self._state.swap
        if mode == "in_flight":
            await load_into(sampler, weights, self.replicas.load)
            return
        resuming = sampler if mode == "abort" and isinstance(sampler, ResumingSampler) else None
        self._halted += 1
        try:
            if mode == "abort":
                await self.replicas.abort()
            if resuming is None:
                await self._state.condition.wait_for(
                    lambda: not self._running, "publish", "the sampler", lambda: f"{len(self._running)} calls run"
                )
            await load_into(sampler, weights, self.replicas.load)
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
        self._router.take(call.shares, rows.groups.tolist())
        self.replicas.delivered(replica)
        return _without_groups(rows, call.lost) if call.lost else rows

    def end(self, call: GenerateRequest, replica: int, error: Exception | None) -> None:
        """Finish a call on a replica, after its rows are counted. Lost groups are sampled again.

        Once all replicas have finished, aborted rows continue.
        """
        if error := error or call.unread.get(replica):
            self.replicas.failed(call.unfinished[replica], error)
            self._lose(self._state.buffer.incomplete(call.labels(replica)))
        else:
            call.check(replica)
        self._router.end(share for _, share in call.shares_of(replica))
        del call.unfinished[replica]
        if not call.unfinished:
            del self._running[call.number]
            if call.aborted:
                self._resume(_without_groups(Batch.join(call.aborted).drop("aborted"), call.lost), call)
        self._state.condition.notify_all()

    def unread(self, labels: list[int], error: Exception) -> None:
        """Sample groups again whose columns cannot be fetched, although no replica is known to have died."""
        self.replicas.unread(error)
        self._state.decisions.break_off("rows were lost on their way and drawn again")
        self._lose(labels)
        self._state.condition.notify_all()

    def _may_draw(self) -> bool:
        state = self._state
        # The synchronous loop samples nothing before a batch is requested, not even after the last step.
        if (
            self._halted
            or not self.replicas.are_enough
            or not state.decisions.is_turn("draw")
            or not (state.ledger.ahead or self.demand)
        ):
            return False
        decided = state.decisions.next("draw")
        least = decided.count if decided else max(1, state.ledger.size // _LOT) if self._running else 1
        return bool(self._resumable or (state.ledger.room >= least and state.prompts))

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
        available = self.replicas.available if several else np.arange(self._router.replicas)
        owners = np.array(decided.owners if decided else [], np.int64)
        if not len(owners) or not np.isin(owners, available).all():
            owners = self._router.divide(prompts, sampling, before, available)
        shares = self._router.give(prompts, sampling, owners)
        call = GenerateRequest(self._calls, prompts, sampling, owners, shares, several)
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

    def _changed(self, why: str, death: tuple[Incarnation, Exception] | None) -> None:
        """Handle a change of replicas. The unfinished and held rows of an incarnation that ended are lost."""
        buffer = self._state.buffer
        self._state.decisions.break_off(why)
        if death is None:
            return
        incarnation, error = death
        replica = incarnation[0]
        drawing: list[int] = []
        for call in self._running.values():
            if call.unfinished.get(replica) == incarnation:
                drawing += buffer.incomplete(call.labels(replica))
        self.poison_rows.died(replica, buffer.prompts(drawing), error)
        lost = [*buffer.remote(incarnation), *drawing]
        for rows, call in self._resumable.values():
            if rows.elsewhere and incarnation in call.incarnations:
                lost += [label for label in call.labels(replica) if label in rows.groups]
        self._lose(list(dict.fromkeys(lost)))

    def _lose(self, labels: list[int]) -> None:
        """Sample groups again, from their prompts. Rows of them that still arrive are dropped."""
        state = self._state
        if not labels:
            return
        for label in labels:
            state.ledger.remove(label)
        state.prompts.put_back(state.buffer.pop_prompts(labels))
        for call in self._running.values():
            call.lost.update(call.shares.keys() & set(labels))
        for number, (rows, call) in list(self._resumable.items()):
            del self._resumable[number]
            self._resume(_without_groups(rows, labels), call)

    def _resume(self, rows: Batch, call: GenerateRequest) -> None:
        """Let these rows of a call continue later."""
        if len(rows):
            self._resumable[call.number] = rows, call


def _without_groups(rows: Batch, labels: Collection[int]) -> Batch:
    """Return the rows of other groups than these."""
    return rows.select(np.logical_not(np.isin(rows.groups, list(labels))))
