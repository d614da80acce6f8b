"""What keeps a sampler busy: calls of `generate` as there is room for them, new weights, a new life where it died."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Literal, Never, TypeAlias

import numpy as np

from meshrl import log
from meshrl.data import Batch
from meshrl.errors import DataError, EngineDied, RankDied, RankFailed
from meshrl.mesh import Rows, parts, respawn, routed
from meshrl.roles import Sampler, Sampling
from meshrl.rollout.condition import Condition
from meshrl.rollout.grouping import GroupBuffer
from meshrl.rollout.prompt_queue import PromptQueue
from meshrl.rollout.replay import Decision, DecisionLog, load_into
from meshrl.rollout.routing import NOWHERE, Router, Share
from meshrl.rollout.staleness import StalenessLedger
from meshrl.weights import Weights

SwapMode: TypeAlias = Literal["in_flight", "drain", "abort"]
"""What publishing does to rollouts that run: they go on, with the new weights from their next token; they are finished
first, and none begins meanwhile; or they stop, and go on from where they were with the new weights."""

_LOT = 8
"""While calls run, the next one begins where this part of a batch has room: many small calls decode slowly."""


@dataclass(eq=False)
class GenerateRequest:
    """One call of `generate`."""

    number: int
    prompts: Batch
    sampling: Sampling
    owners: Rows
    """The replica that draws each of them."""
    given: Mapping[int, Share]
    """What the replicas still have of each group."""
    life: int
    """Which life of the sampler it runs in."""
    rows: int = 0
    """How many came."""
    aborted: list[Batch] = field(default_factory=list)
    """What it did not finish."""

    def check(self) -> None:
        """DataError where it ended well and lacks rows."""
        wanted = len(self.prompts) * self.sampling.n
        if self.rows != wanted:
            raise DataError(
                f"the sampler returned {self.rows} rollouts for {len(self.prompts)} prompts x {self.sampling.n} "
                "completions"
            )


@dataclass(frozen=True)
class StreamState:
    """What the two sides of a stream work on."""

    ledger: StalenessLedger
    buffer: GroupBuffer
    prompts: PromptQueue
    condition: Condition
    decisions: DecisionLog
    start: Callable[[Coroutine[Never, Never, None]], None]
    """Run a task as long as the stream lasts; if it fails, so does the stream."""


class Producer:
    """The side of a stream that faces the sampler."""

    def __init__(self, sampler: Sampler, sampling: Sampling, swap: SwapMode, retries: int, state: StreamState) -> None:
        self.arrived: list[tuple[GenerateRequest, Batch | Exception | None]] = []
        """Rows that came and, at the end of a call, None or what it raised."""
        self.demand = False
        """Whether the trainer waits for a batch."""
        self.sampler = sampler
        self._sampling = sampling
        self._mode = swap
        self._retries = retries
        self._state = state
        self._router = Router(parts(sampler.generate))
        self._resumable: dict[int, tuple[Batch, Mapping[int, Share]]] = {}
        """By the call that was aborted, so that they go on in one order, whichever ended first; and where they were."""
        self._running: dict[int, GenerateRequest] = {}
        self._calls = 0
        self._halted = 0
        """How many want that no call begins."""
        self._changing = asyncio.Lock()
        """Held by who changes the sampler: its weights, or its life."""
        self._life = 0
        self._weights: Weights | None = None

    async def run(self) -> None:
        """Begin a call whenever there is room."""
        it = self._state
        while True:
            await it.condition.wait_for(self._may_draw, "rollout", "capacity", self._why_not)
            decided, before = it.decisions.next("draw"), NOWHERE
            if self._resumable:
                prompts, before = self._resumable.pop(min(self._resumable))
                sampling = self._sampling.model_copy(update={"n": 1})
            else:
                prompts, sampling = it.prompts.take(decided.count if decided else it.ledger.room), self._sampling
                for label in prompts.groups.tolist():
                    it.ledger.draw(label)
                it.buffer.expect(prompts)
            call = self._request(prompts, sampling, before, decided)
            it.decisions.note("draw", len(prompts), owners=call.owners.tolist() if self._router.replicas > 1 else [])
            if decided:
                it.condition.notify_all()  # the trainer's turn may be next
            it.start(self._generate(call))

    async def swap(self, weights: Weights) -> None:
        """Give the sampler new weights, in this stream's way."""
        self._weights = weights
        if self._mode == "in_flight":
            await self._change(lambda: self._load(weights))
            return
        self._halted += 1
        try:
            if self._mode == "abort":
                await self._change(self.sampler.abort)
            await self._state.condition.wait_for(
                lambda: not self._running, "publish", "the sampler", lambda: f"{len(self._running)} calls run"
            )
            await self._change(lambda: self._load(weights))
        finally:
            self._halted -= 1
            self._state.condition.notify_all()

    def came(self, call: GenerateRequest, rows: Batch) -> None:
        """Rows of a call have come; their `groups` can be read."""
        call.rows += len(rows)
        self._router.take(call.given, rows.groups.tolist())

    async def end(self, call: GenerateRequest, error: Exception | None) -> None:
        """A call is over, and all that it yielded is counted: what it stopped goes on, what it lost is drawn again."""
        self._router.end(call.given)
        if error is not None:
            self._lose(self._state.buffer.incomplete(call.prompts.groups.tolist()))
            await self._recover(call.life, error)
        else:
            call.check()
            if call.aborted:
                self._resumable[call.number] = Batch.join(call.aborted).drop("aborted"), call.given
        del self._running[call.number]
        self._state.condition.notify_all()

    def _may_draw(self) -> bool:
        it = self._state
        # In the synchronous loop nothing is drawn ahead of the question, not even after the last step.
        if self._halted or not it.decisions.is_turn("draw") or not (it.ledger.ahead or self.demand):
            return False
        decided = it.decisions.next("draw")
        least = decided.count if decided else max(1, it.ledger.size // _LOT) if self._running else 1
        return bool(self._resumable or (it.ledger.room >= least and it.prompts))

    def _why_not(self) -> str:
        ledger = self._state.ledger
        if self._halted:
            return "new weights are on their way to the sampler"
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
        if decided and decided.owners:
            owners = np.array(decided.owners)
        else:
            owners = self._router.divide(prompts, sampling, before)
        given = self._router.give(prompts, sampling, owners)
        call = GenerateRequest(self._calls, prompts, sampling, owners, given, self._life)
        self._calls += 1
        self._running[call.number] = call
        return call

    async def _generate(self, call: GenerateRequest) -> None:
        """Run a call to its end, whatever that is."""
        ended: Exception | None = None
        generate = routed(self.sampler.generate, call.owners)
        chunks = generate(call.prompts.part(np.arange(len(call.prompts))), call.sampling)
        try:
            async for chunk in chunks:
                self.arrived.append((call, chunk))
                self._state.condition.notify_all()
        except Exception as error:  # noqa: BLE001 -- whatever a sampler raises may be tried again
            ended = error
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
        self.arrived.append((call, ended))
        self._state.condition.notify_all()

    async def _load(self, weights: Weights) -> None:
        await load_into(self.sampler, weights)

    async def _change(self, change: Callable[[], Coroutine[Never, Never, None]]) -> None:
        """Change the sampler; one that dies of it, or had died, is given a new life with the newest weights."""
        async with self._changing:
            try:
                await change()
            except (RankDied, RankFailed) as error:
                if not _died(error):
                    raise
                await self._revive(error)

    async def _recover(self, life: int, error: Exception) -> None:
        """After a call has failed."""
        self._halted += 1
        try:
            async with self._changing:
                if life == self._life:  # else what ended that life has been seen to
                    await self._revive(error)
        finally:
            self._halted -= 1
            self._state.condition.notify_all()

    async def _revive(self, error: Exception) -> None:
        """Begin a new life: of a sampler that died with the weights that were published last, as often as it takes."""
        self._halted += 1
        try:
            while (again := await self._new_life(error)) is not None:
                error = again
        finally:
            self._halted -= 1
            self._state.condition.notify_all()

    async def _new_life(self, error: Exception) -> Exception | None:
        """What ended the new life before it had its weights, or None."""
        died = _died(error)
        if not self._retries or (died and self._weights is None):
            raise error  # also where nobody here knows the weights that it had
        self._retries -= 1
        self._life += 1
        log.warning("rollouts were lost and are drawn again", retries_left=self._retries, error=str(error))
        if not died or self._weights is None:
            return None
        self._lose(self._state.buffer.elsewhere())
        try:
            await respawn(self.sampler)
            await load_into(self.sampler, self._weights)
        except (RankDied, RankFailed) as again:
            if not _died(again):
                raise
            return again
        return None

    def _lose(self, labels: list[int]) -> None:
        """Draw groups again, from their prompts."""
        it = self._state
        if labels:
            for label in labels:
                it.ledger.restart(label)
            it.prompts.put_back(it.buffer.lose(labels))


def _died(error: Exception) -> bool:
    """Whether a sampler can do nothing more until it is respawned."""
    return isinstance(error, RankDied) or (isinstance(error, RankFailed) and isinstance(error.__cause__, EngineDied))
