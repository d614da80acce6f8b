"""The prompts that a stream of rollouts still has to draw."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError


class Prompts:
    """Batches of prompts of one size, dealt out some rows at a time. False when there are no more."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._next: deque[Batch] = deque()
        self.size = len(self._next[0]) if self else 0
        """Rows of a batch."""

    def __bool__(self) -> bool:
        if not self._next and (batch := next(self._batches, None)) is not None:
            if "groups" not in batch:
                raise DataError(
                    "a stream of rollouts needs prompts with `groups`, another number for each: take them from "
                    "`Task.batches`, or assign them"
                )
            if not len(batch):
                raise DataError("a stream of rollouts got a batch of no prompts: leave it out")
            self._next.append(batch)
        return bool(self._next)

    def take(self, most: int) -> Batch:
        """The next prompts, of one batch and at most so many."""
        batch = self._next.popleft()
        if len(batch) > most:
            self._next.appendleft(batch.select(np.arange(most, len(batch))))
            batch = batch.select(np.arange(most))
        return batch

    def put_back(self, prompts: Batch) -> None:
        """These were lost, and are the next to be drawn."""
        self._next.appendleft(prompts)
