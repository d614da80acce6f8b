"""The KL of sampled completions to a reference model: as a penalty on rewards, and as a metric."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshrl.algo.advantages import learned_values
from meshrl.data import Batch
from meshrl.errors import DataError

_COLUMNS: Final = ("loss_mask", "logprobs", "reference_logprobs")


def kl_columns(kl: float) -> tuple[str, ...]:
    """Return the columns that `penalised_rewards` reads in addition to `rewards`, to load them. None if `kl` is 0."""
    return _COLUMNS if kl else ()


def penalised_rewards(batch: Batch, kl: float) -> NDArray[np.float32]:
    """Subtract `kl` times the row's KL from each reward: `r - kl sum_t log(pi(y_t) / pi_ref(y_t))`, float32[rows].

    Reads `rewards`, and `logprobs`, `reference_logprobs` and `loss_mask` if `kl` is above 0. The sum is over the row's
    learned tokens. Raises DataError if a column is missing or a log-prob is not finite.

    RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), computes its baseline from such rewards:
    `leave_one_out(penalised_rewards(batch, kl), batch.groups)`.
    """
    if not kl:
        return batch.rewards
    missing = [name for name in _COLUMNS if name not in batch]
    if missing:
        raise DataError(
            f"kl = {kl:g} lowers rewards by the KL of `logprobs` from `reference_logprobs`, and the batch has no "
            f"`{'`, `'.join(missing)}`: call policy.logprobs and reference.logprobs before, or set kl = 0"
        )
    row, distances = _distances(batch)
    if len(bad := row[~np.isfinite(distances)]):
        raise DataError(f"row {bad[0]} has log-probs that are not finite: its KL to the reference is not a number")
    sums = np.bincount(row, distances, minlength=len(batch))
    return (batch.rewards.astype(np.float64) - kl * sums).astype(np.float32)


def kl_metrics(batch: Batch) -> dict[str, float]:
    """Compute `reference_k1`, the mean of `log(pi / pi_ref)` over learned tokens, in nats: the k1 estimate of the KL.

    For `run.record`. Empty if the batch lacks a column or if one is remote: without a reference there is no KL.
    """
    if any(name not in batch or name in batch.elsewhere for name in _COLUMNS):
        return {}
    _, distances = _distances(batch)
    return {"reference_k1": float(distances.mean())} if len(distances) else {}


def _distances(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each learned token's row, and the policy's log-prob minus the reference's."""
    mask = batch.loss_mask
    row = np.repeat(np.arange(len(mask)), mask.lengths)[np.asarray(mask.values, np.bool_)]
    own, reference = (learned_values(name, batch.ragged(name), mask) for name in _COLUMNS[1:])
    return row, own - reference
