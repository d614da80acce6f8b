"""Several optimizer steps on one batch."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch
from meshrl.errors import DataError


def minibatches(batch: Batch, epochs: int, count: int, seed: int | Sequence[int]) -> Iterator[Batch]:
    """Iterate over the rows `epochs` times, each time in `count` mini-batches that are drawn without replacement.

    Sizes differ by at most one row. A batch with fewer rows than `count` gives one mini-batch for each row. `seed`, one
    or several numbers such as (run.seed, step), decides which rows are together. Within a mini-batch rows keep their
    order. Rows without a learned token are skipped, so that every mini-batch has something to learn. This needs a local
    `loss_mask`: if it is remote, all rows are kept. Raises DataError if `epochs` or `count` is below 1, or if no row
    has a learned token. Algorithm 1 of PPO (arXiv:1707.06347) samples in this way.
    """
    if epochs < 1 or count < 1:
        raise DataError(f"minibatches: {epochs} epochs of {count} mini-batches; give at least 1 of each")
    if "loss_mask" in batch and "loss_mask" not in batch.elsewhere:
        batch = batch.select(_learned(batch))
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        for rows in np.array_split(generator.permutation(len(batch)), min(count, len(batch)) or 1):
            if len(rows):
                yield batch.select(np.sort(rows))


def _learned(batch: Batch) -> NDArray[np.bool_]:
    """Mark the rows that have a learned token, bool[rows]. DataError if there are rows and none has one."""
    mask = batch.loss_mask
    row = np.repeat(np.arange(len(mask)), mask.lengths)[np.asarray(mask.values, np.bool_)]
    learned = np.bincount(row, minlength=len(mask)) > 0
    if len(mask) and not learned.any():
        raise DataError(
            f"minibatches: nothing to learn: `loss_mask` is False for all tokens of {len(mask)} rows; leave such a "
            "batch out"
        )
    return learned
