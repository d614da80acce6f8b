"""The prompts that a stream of rollouts has not sampled yet."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Final

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.mesh import Waiting
from meshrl.tasks import DataCursor

_PULL: Final = "next(prompts), for which everything else waits,"


class PromptQueue:
    """Batches of prompts of one size, returned some rows at a time. False when there are no more."""

    def __init__(self, batches: Iterable[Batch], here: DataCursor | None = None) -> None:
        """`here`: the run's position in its data. Prompts that were used are skipped."""
        self._batches = iter(batches)
        self._here = here
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
            kept = batch.select(self._here.draw(batch.groups)) if self._here else batch
            if len(kept):
                self._next.append(kept)
        return bool(self._next)

    def _pull(self) -> Batch | None:
        with Waiting(_PULL, ()).running(), self._here.pulling() if self._here else nullcontext():
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
