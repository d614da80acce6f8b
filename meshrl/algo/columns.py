"""The columns of a batch as a loss reads them: one value for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshrl.data import Ragged, check_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshrl.data import Batch


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
        return _narrow(column.values[tokens])
    row = np.searchsorted(offsets, tokens, side="right") - 1
    if name == "rows":
        return np.unique(row, return_inverse=True)[1]
    return _narrow(batch.row(name)[row])


def _narrow(values: NDArray[np.generic]) -> NDArray[np.generic]:
    return values if values.dtype.kind in "biu" else values.astype(np.float32, copy=False)
