"""Rollouts as they come, some rows at a time, into whole groups, and these into batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.sharding import Rows


@dataclass(eq=False)
class _Chunk:
    """Rows that came together from one call of `generate`."""

    call: int
    batch: Batch


@dataclass
class _Group:
    """What has come of a group."""

    prompt: tuple[Batch, int]
    """The prompts that it was drawn with, and its row."""
    pieces: list[tuple[_Chunk, Rows]] = field(default_factory=list)
    rows: int = 0
    oldest: int = np.iinfo(np.int64).max


class Assembly:
    """Collects groups of `size` rows. A row is known by its `groups`; its place in a group by its call and origin."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[int, _Group] = {}
        self._scored = 0

    def expect(self, prompts: Batch) -> None:
        """Rows of these groups will come."""
        self._groups.update((label, _Group((prompts, row))) for row, label in enumerate(prompts.groups.tolist()))

    def add(self, call: int, batch: Batch) -> dict[int, int]:
        """Take rows; the groups that are complete now, each with the number of the weights of its oldest token.

        Needs `groups` and `oldest_version`. Rows of groups that are not expected any more are left out. DataError
        where a group gets more rows than it has.
        """
        complete: dict[int, int] = {}
        if not len(batch):
            return complete
        chunk = _Chunk(call, batch)
        labels = batch.groups
        order = np.argsort(labels, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(labels[order]) != 0))
        oldest = np.minimum.reduceat(batch.row("oldest_version")[order], starts)
        for label, rows, version in zip(
            labels[order[starts]].tolist(), np.split(order, starts[1:]), oldest.tolist(), strict=True
        ):
            group = self._groups.get(label)
            if group is None:
                continue
            group.pieces.append((chunk, rows))
            group.rows += len(rows)
            group.oldest = min(group.oldest, version)
            if group.rows > self._size:
                raise DataError(
                    f"group {label} got {group.rows} rows and has {self._size}: the sampler yielded a row twice, or "
                    "two prompts have the same `groups`"
                )
            if group.rows == self._size:
                complete[label] = group.oldest
        return complete

    def put(self, batch: Batch) -> None:
        """Take complete groups again, scored: their rows together, as `batch` gave them."""
        self._scored += 1
        chunk = _Chunk(-self._scored, batch)
        bounds = np.flatnonzero(np.append(True, np.diff(batch.groups) != 0))
        for label, rows in zip(batch.groups[bounds].tolist(), np.split(np.arange(len(batch)), bounds[1:]), strict=True):
            self._groups[label].pieces = [(chunk, rows)]

    def lose(self, labels: Iterable[int]) -> Batch:
        """Let go of what has come of groups; their prompts."""
        prompts = [self._groups.pop(label).prompt for label in labels]
        return Batch.concat([batch.select([row]) for batch, row in prompts])

    def missing(self, label: int) -> int:
        """Rows of a group that have not come; 0 for one that is not expected."""
        return self._size - self._groups[label].rows if label in self._groups else 0

    def batch(self, labels: Sequence[int]) -> Batch:
        """The rows of complete groups, in the order of these labels, each group's together in the sampler's order."""
        rows_of: dict[_Chunk, list[Rows]] = {}
        for label in labels:
            for chunk, rows in self._groups[label].pieces:
                rows_of.setdefault(chunk, []).append(rows)
        calls: dict[int, list[Batch]] = {}
        for chunk, rows in rows_of.items():
            calls.setdefault(chunk.call, []).append(chunk.batch.select(np.sort(np.concatenate(rows))))
        # Each call's rows know their order in the call.
        whole = Batch.concat([Batch.join(parts) for _, parts in sorted(calls.items())])
        by_label = np.argsort(labels)
        place = by_label[np.searchsorted(np.asarray(labels), whole.groups, sorter=by_label)]
        return whole.select(np.argsort(place, kind="stable"))

    def forget(self, labels: Iterable[int]) -> None:
        """Let go of groups, complete or not."""
        for label in labels:
            del self._groups[label]
