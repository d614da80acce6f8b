"""How token losses become one number, regardless of how rows are divided over ranks and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from meshrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshrl.data import Ragged

Normalise: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum", "constant"]
"""How the token losses of a batch become one number: see `token_weights`."""


def token_weights(
    loss_mask: Ragged, normalise: Normalise, *, tokens: int, rows: int, constant: int | None = None
) -> NDArray[np.float32]:
    """Compute the weight of each token. The loss is `sum(weights * losses)` over all ranks and micro-batches.

    `loss_mask` (bool) covers some rows of the global batch. `tokens` is the number of learned tokens of the global
    batch, and `rows` the number of its rows that have any. Returns float32[tokens of the given rows], zero where the
    mask is False.

    - "token-mean": `1 / tokens`. Long rows weigh more. DAPO (arXiv:2503.14476), equation 12, which takes the mean over
      a prompt's group instead of the batch.
    - "sequence-mean": `1 / (rows * learned tokens of the row)`. Rows weigh the same. DeepSeekMath (arXiv:2402.03300),
      equation 3.
    - "sequence-sum": `1 / rows`. A row's loss is the sum over its tokens, like the log-probability of a sequence.
      REINFORCE: Williams 1992; RLOO (arXiv:2402.14740).
    - "constant": `1 / (rows * constant)`, where `constant` is the longest completion that is allowed, in tokens. No
      length bias. Dr. GRPO (arXiv:2503.20783), section 3.

    Raises ConfigError if `constant` is missing or has no effect, and DataError if the totals are smaller than those of
    the given rows.
    """
    if mistake := constant_mistake(normalise, constant):
        raise ConfigError(mistake)
    mask = np.asarray(loss_mask.values, dtype=np.bool_)
    row = np.repeat(np.arange(len(loss_mask)), loss_mask.lengths)
    learned = np.bincount(row[mask], minlength=len(loss_mask))
    _check_totals(int(learned.sum()), int((learned > 0).sum()), tokens, rows)
    divisor: NDArray[np.int64]
    match normalise:
        case "token-mean":
            divisor = np.full(len(loss_mask), tokens)
        case "sequence-mean":
            divisor = rows * learned
        case "sequence-sum":
            divisor = np.full(len(loss_mask), rows)
        case "constant":
            divisor = np.full(len(loss_mask), rows * (constant or 0))
    weights = np.zeros(len(mask), np.float32)
    weights[mask] = 1 / divisor[row[mask]]
    return weights


def constant_mistake(normalise: Normalise, constant: int | None) -> str | None:
    """Describe the mistake if the constant is missing or has no effect. None if there is no mistake."""
    if normalise == "constant" and constant is None:
        return (
            'normalise = "constant" divides by `constant` tokens, which is not set: '
            "set it to the longest completion that is allowed, in tokens"
        )
    if normalise != "constant" and constant is not None:
        return f'constant = {constant} has no effect with normalise = "{normalise}": remove one of them'
    return None


def _check_totals(own_tokens: int, own_rows: int, tokens: int, rows: int) -> None:
    if own_tokens > tokens or own_rows > rows:
        raise DataError(
            f"token_weights: the given rows have {own_tokens} learned tokens in {own_rows} rows, more than "
            f"the {tokens} tokens and {rows} rows given for the global batch. "
            "Sum both over all ranks and micro-batches."
        )
