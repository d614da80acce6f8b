"""What both sides of a stream share: its settings, prompts, groups and tasks, and the condition that they wait for."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Never, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.events import waiting
from meshrl.mesh import Rows, Waiting
from meshrl.overlap.replay import DecisionLog
from meshrl.overlap.staleness import StalenessLedger
from meshrl.roles import Sampler, Sampling
from meshrl.tasks import DataCursor

SwapMode: TypeAlias = Literal["in_flight", "drain", "abort"]
"""The effect of a publication on running rollouts. `in_flight`: they use the new weights from the next token. `drain`:
they finish first, and none starts before. `abort`: they stop, and continue with the new weights."""
Score: TypeAlias = Callable[[Batch], Awaitable[Batch]]
Keep: TypeAlias = Callable[[Batch], ArrayLike]


class Condition:
    """Tasks of one loop that wait for conditions, and check them again after each change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def notify_all(self) -> None:
        """Make all waiting tasks check again."""
        self._changed.set()
        self._changed.clear()

    def fail(self, error: BaseException) -> None:
        """Fail all waiting tasks, whose conditions may never hold. The first failure counts."""
        self._error = self._error or error
        self.notify_all()

    async def wait_quietly_for(self, ready: Callable[[], bool]) -> None:
        """Wait until a condition holds, without logging. For tasks that mostly wait."""
        while not ready():
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    async def wait_for(self, ready: Callable[[], bool], who: str, what: str, why: Callable[[], str]) -> None:
        """Wait until a condition holds. For the log, `who` waits for `what`, and `why` says what blocks it.

        Raises the failure, if there is one and the condition does not hold.
        """
        if not ready():
            with waiting(who, what, why):
                await self.wait_quietly_for(ready)


class PromptQueue:
    """Batches of prompts of one size, returned some rows at a time. False when there are no more."""

    def __init__(self, batches: Iterable[Batch], cursor: DataCursor | None) -> None:
        """`cursor`: the run's position in its data. Used prompts are skipped."""
        self._batches = iter(batches)
        self._cursor = cursor
        self._next: deque[Batch] = deque()
        self.size: int = 0
        """Rows of a batch, as in the first one."""
        bool(self)

    def __bool__(self) -> bool:
        while not self._next and (batch := self._pull()) is not None:
            if "groups" not in batch:
                raise DataError(
                    "a stream of rollouts needs prompts with `groups`, a different number for each: take them from "
                    "`Task.batches`, or assign them"
                )
            if not len(batch):
                raise DataError("a stream of rollouts got a batch of no prompts: leave it out")
            self.size = self.size or len(batch)
            unused = batch.select(self._cursor.draw(batch.groups)) if self._cursor else batch
            if len(unused):
                self._next.append(unused)
        return bool(self._next)

    def _pull(self) -> Batch | None:
        name = "next(prompts), for which everything else waits,"
        with Waiting(name, ()).running(), self._cursor.pulling() if self._cursor else nullcontext():
            return next(self._batches, None)

    def take(self, most: int) -> Batch:
        """Return the next prompts, at most `most` and at most the rows of a batch, even across batches."""
        most = min(most, self.size)
        taken: list[Batch] = []
        while most and self:
            batch = self._next.popleft()
            if len(batch) > most:
                self._next.appendleft(batch.select(np.arange(most, len(batch))))
                batch = batch.select(np.arange(most))
            taken.append(batch)
            most -= len(batch)
        return Batch.concat(taken)

    def put_back(self, prompts: Batch) -> None:
        """Return lost prompts to the front of the queue."""
        self._next.appendleft(prompts)

    @property
    def waiting(self) -> Iterator[int]:
        """Yield the `groups` of prompts that are still queued here."""
        return (label for batch in self._next for label in batch.groups.tolist())


@dataclass(eq=False)
class _Chunk:
    """Rows that arrived together from one call of `generate`."""

    call: int
    batch: Batch


@dataclass
class _Group:
    """The rows of a group that have arrived."""

    prompt: tuple[Batch, int]
    """The prompts that it was drawn with, and its row."""
    pieces: list[tuple[_Chunk, Rows]] = field(default_factory=list)
    rows: int = 0
    oldest: int = np.iinfo(np.int64).max
    samplers: set[object] = field(default_factory=set[object])
    """The incarnations of replicas that sampled it."""


class GroupBuffer:
    """Collects groups of `size` rows. `groups` identifies a row's group, its call and origin its place in it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[int, _Group] = {}
        self._scored = 0

    def expect(self, prompts: Batch) -> None:
        """Announce the groups of these prompts."""
        self._groups.update((label, _Group((prompts, row))) for row, label in enumerate(prompts.groups.tolist()))

    def add(self, call: int, batch: Batch, incarnation: object) -> dict[int, int]:
        """Add rows. Returns the groups that are now complete, with the version of each group's oldest token.

        `incarnation`: of the replica that sampled them. Needs `groups` and `oldest_version`. Rows of groups that are no
        longer expected are dropped. DataError if a group gets too many rows.
        """
        complete: dict[int, int] = {}
        chunk, versions = _Chunk(call, batch), batch.row("oldest_version").tolist()
        for label, rows in _by_label(batch.groups):
            group = self._groups.get(label)
            if group is None:
                continue
            group.pieces.append((chunk, rows))
            group.rows += len(rows)
            group.samplers.add(incarnation)
            group.oldest = min(group.oldest, *[versions[row] for row in rows.tolist()])
            if group.rows > self._size:
                raise DataError(
                    f"group {label} got {group.rows} rows and has {self._size}: the sampler yielded a row twice, or "
                    "two prompts have the same `groups`"
                )
            if group.rows == self._size:
                complete[label] = group.oldest
        return complete

    def put(self, batch: Batch) -> None:
        """Store complete groups again, scored, with their rows in the order of `batch`."""
        self._scored += 1
        chunk = _Chunk(-self._scored, batch)
        for label, rows in _by_label(batch.groups):
            self._groups[label].pieces = [(chunk, rows)]

    def pop_prompts(self, labels: Iterable[int]) -> Batch:
        """Drop groups, and return their prompts."""
        prompts = [self._groups.pop(label).prompt for label in labels]
        return Batch.concat([batch.select([row]) for batch, row in prompts])

    def prompts(self, labels: Iterable[int]) -> dict[int, object]:
        """Return the prompts of groups by label: texts, if those are local."""
        texts: dict[int, object] = {}
        for label in labels:
            batch, row = self._groups[label].prompt
            is_local = "prompt" in batch and "prompt" not in batch.elsewhere
            texts[label] = batch.objects("prompt")[row] if is_local else None
        return texts

    def incomplete(self, labels: Iterable[int]) -> list[int]:
        """Return the groups with missing rows, each once."""
        expected = (label for label in dict.fromkeys(labels) if label in self._groups)
        return [label for label in expected if self._groups[label].rows < self._size]

    def remote(self, incarnation: object) -> list[int]:
        """Return the groups that this incarnation of a replica sampled, with columns on the ranks that made them."""
        return [
            label
            for label, group in self._groups.items()
            if incarnation in group.samplers and any(chunk.batch.elsewhere for chunk, _ in group.pieces)
        ]

    def attempts(self, labels: Iterable[int]) -> dict[int, object]:
        """Return objects that distinguish a group from a later one with its label, which replaces a lost one."""
        return {label: self._groups.get(label) for label in labels}

    def batch(self, labels: Sequence[int]) -> Batch:
        """Return the rows of complete groups in the order of these labels. Rows of a group keep the sampler's order."""
        pieces: dict[_Chunk, list[Rows]] = {}
        for label in labels:
            for chunk, rows in self._groups[label].pieces:
                pieces.setdefault(chunk, []).append(rows)
        calls: dict[int, list[Batch]] = {}
        for chunk, parts in pieces.items():
            calls.setdefault(chunk.call, []).append(chunk.batch.select(np.sort(np.concatenate(parts))))
        # The rows of each call know their order in the call.
        whole = Batch.concat([Batch.join(parts) for _, parts in sorted(calls.items())])
        by_label = np.argsort(labels)
        place = by_label[np.searchsorted(np.asarray(labels), whole.groups, sorter=by_label)]
        return whole.select(np.argsort(place, kind="stable"))

    def forget(self, labels: Iterable[int]) -> None:
        """Drop groups, complete or not."""
        for label in labels:
            del self._groups[label]


def _by_label(labels: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield the row numbers of each label, ascending."""
    if len(labels) == 1:
        yield int(labels[0]), np.zeros(1, np.int64)
    elif len(labels):
        order = np.argsort(labels, kind="stable")
        sorted_labels = labels[order]
        starts = [0, *(np.flatnonzero(sorted_labels[1:] != sorted_labels[:-1]) + 1).tolist(), len(order)]
        for start, end in pairwise(starts):
            yield int(sorted_labels[start]), order[start:end]


@dataclass(frozen=True, eq=False)
class StreamState:
    """The settings and the state of a stream, which the sides of the sampler and of the trainer share."""

    sampler: Sampler
    sampling: Sampling
    swap: SwapMode
    retries: int
    score: Score | None
    keep: Keep | None
    prompts: PromptQueue
    ledger: StalenessLedger
    buffer: GroupBuffer
    decisions: DecisionLog
    condition: Condition = field(default_factory=Condition)
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def start(self, work: Coroutine[Never, Never, None]) -> None:
        """Run a task until the stream ends. If it fails, the stream fails."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.condition.fail(error)
