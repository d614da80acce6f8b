"""Several optimizer steps on one batch."""

from collections.abc import Iterator, Sequence

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError


def minibatches(batch: Batch, epochs: int, count: int, seed: int | Sequence[int]) -> Iterator[Batch]:
    """Go through the rows `epochs` times, each time in `count` mini-batches drawn without replacement.

    The sizes differ by one row at most; a batch of fewer rows than `count` gives one mini-batch a row. `seed`, one
    number or several, (run.seed, step) for example, decides which rows meet; within a mini-batch they keep their order.
    Raises DataError where `epochs` or `count` is below 1. Algorithm 1 of PPO (arXiv:1707.06347) draws so.
    """
    if epochs < 1 or count < 1:
        raise DataError(f"minibatches: {epochs} epochs of {count} mini-batches; give at least 1 of each")
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        for rows in np.array_split(generator.permutation(len(batch)), min(count, len(batch)) or 1):
            if len(rows):
                yield batch.select(np.sort(rows))
