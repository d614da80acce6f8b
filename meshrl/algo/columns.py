"""The columns of a batch as losses read them, the values of learned tokens, and mini-batches."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.data import Batch, Ragged, check_lengths, why_unknown
from meshrl.errors import DataError


def spread(batch: Batch, name: str, tokens: NDArray[np.int64]) -> NDArray[np.generic]:
    """Return a column at these positions of the token column. A row column gives each token its row's value.

    `tokens` is int64[tokens], and the result has its length. Floating columns become float32. The reserved name `rows`
    gives each token the number of its row among those of these positions, int64. Raises DataError if a token column has
    rows of other lengths than the batch's tokens.
    """
    offsets = batch.tokens.offsets
    if name != "rows" and isinstance(column := batch[name], Ragged):
        if column.offsets is not offsets:
            check_lengths(name, column.lengths, batch.tokens.lengths)
        values = column.values[tokens]
    else:
        row = np.searchsorted(offsets, tokens, side="right") - 1
        if name == "rows":
            return np.unique(row, return_inverse=True)[1]
        values = batch.row(name)[row]
    return values if values.dtype.kind in "biu" else values.astype(np.float32, copy=False)


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
        learned = learned_counts(batch.loss_mask) > 0
        if len(learned) and not learned.any():
            raise DataError(
                why_unknown(batch)
                or f"minibatches: nothing to learn: `loss_mask` is False for all tokens of {len(learned)} rows; leave "
                "such a batch out"
            )
        batch = batch.select(learned)
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        for rows in np.array_split(generator.permutation(len(batch)), min(count, len(batch)) or 1):
            if len(rows):
                yield batch.select(np.sort(rows))


def learned_rows(loss_mask: Ragged) -> NDArray[np.int64]:
    """Return the row of each token where `loss_mask` is True, int64[learned tokens]."""
    return np.repeat(np.arange(len(loss_mask)), loss_mask.lengths)[np.asarray(loss_mask.values, np.bool_)]


def learned_counts(loss_mask: Ragged) -> NDArray[np.int64]:
    """Count the tokens of each row where `loss_mask` is True, int64[rows]."""
    return np.bincount(learned_rows(loss_mask), minlength=len(loss_mask))


def learned_values(name: str, column: Ragged, loss_mask: Ragged) -> NDArray[np.float64]:
    """Return a token column's entries where `loss_mask` is True, float64[learned tokens].

    DataError if the column does not fit the mask.
    """
    if not np.array_equal(column.offsets, loss_mask.offsets):
        raise DataError(
            f"`{name}` has {len(column)} rows of {len(column.values)} tokens and `loss_mask` {len(loss_mask)} rows of "
            f"{len(loss_mask.values)}, or rows of other lengths: both must have one value for each token"
        )
    return np.asarray(column.values, np.float64)[np.asarray(loss_mask.values, np.bool_)]


def learned_column(values: ArrayLike, loss_mask: Ragged) -> Ragged:
    """Make a token column, ragged float32, of values [learned tokens], with 0 where `loss_mask` is False."""
    column = np.zeros(len(loss_mask.values), np.float32)
    column[np.asarray(loss_mask.values, np.bool_)] = values
    return Ragged.make(column, loss_mask.offsets)


def means(**values: NDArray[np.float64] | NDArray[np.bool_]) -> dict[str, float]:
    """Return the mean of each array of numbers [any], NaN if it is empty."""
    return {name: float(np.mean(each)) if len(each) else float("nan") for name, each in values.items()}
