"""The prompts that a stream of rollouts still has to sample."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.tasks import DataCursor


class PromptQueue:
    """Batches of prompts of one size, dealt out some rows at a time. False when there are no more."""

    def __init__(self, batches: Iterable[Batch], here: DataCursor | None = None) -> None:
        """`here`: where the run stands in its data, which leaves out what was used."""
        self._batches = iter(batches)
        self._here = here
        self._next: deque[Batch] = deque()
        self.size: int = 0
        """Rows of a batch, the first that came."""
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
        with self._here.pulling() if self._here else nullcontext():
            return next(self._batches, None)

    def take(self, most: int) -> Batch:
        """The next prompts, at most so many and at most a batch: as many, wherever the batches begin and end."""
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
        """These were lost, and are the next to be drawn."""
        self._next.appendleft(prompts)

    @property
    def waiting(self) -> Iterator[int]:
        """The `groups` of prompts that were taken from the batches, and not from here."""
        return (label for batch in self._next for label in batch.groups.tolist())
