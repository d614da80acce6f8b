"""Collect arriving rows into complete groups, and groups into batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.mesh import Rows


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
    lives: set[object] = field(default_factory=set[object])
    """The lives of the replicas that sampled it."""


class GroupBuffer:
    """Collects groups of `size` rows. `groups` identifies a row's group, its call and origin its place in it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[int, _Group] = {}
        self._scored = 0

    def expect(self, prompts: Batch) -> None:
        """Announce the groups of these prompts."""
        self._groups.update((label, _Group((prompts, row))) for row, label in enumerate(prompts.groups.tolist()))

    def add(self, call: int, batch: Batch, life: object = None) -> dict[int, int]:
        """Add rows. Returns the groups that are now complete, with the version of each group's oldest token.

        `life`: of the replica that sampled them. Needs `groups` and `oldest_version`. Rows of groups that are no longer
        expected are dropped. DataError if a group gets too many rows.
        """
        complete: dict[int, int] = {}
        chunk, versions = _Chunk(call, batch), batch.row("oldest_version").tolist()
        for label, rows in _by_label(batch.groups):
            group = self._groups.get(label)
            if group is None:
                continue
            group.pieces.append((chunk, rows))
            group.rows += len(rows)
            group.lives.add(life)
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

    def lose(self, labels: Iterable[int]) -> Batch:
        """Drop the rows of groups, and return the prompts."""
        prompts = [self._groups.pop(label).prompt for label in labels]
        return Batch.concat([batch.select([row]) for batch, row in prompts])

    def prompts(self, labels: Iterable[int]) -> dict[int, object]:
        """Return the prompts of groups by label: texts, if those are local."""
        rows = {label: self._groups[label].prompt for label in labels}
        return {
            label: batch.objects("prompt")[row] if "prompt" in batch and "prompt" not in batch.elsewhere else None
            for label, (batch, row) in rows.items()
        }

    def incomplete(self, labels: Iterable[int]) -> list[int]:
        """Return the groups with missing rows, each once."""
        expected = (label for label in dict.fromkeys(labels) if label in self._groups)
        return [label for label in expected if self._groups[label].rows < self._size]

    def elsewhere(self, life: object) -> list[int]:
        """Return the groups of this life of a replica with columns on the ranks that made them."""
        return [
            label
            for label, group in self._groups.items()
            if life in group.lives and any(chunk.batch.elsewhere for chunk, _ in group.pieces)
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
