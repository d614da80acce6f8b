"""The KL of sampled completions to a reference model: how much it lowers rewards, and how large it is."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.objectives.advantages import learned_values

_COLUMNS: Final = ("loss_mask", "logprobs", "reference_logprobs")


def kl_columns(kl: float) -> tuple[str, ...]:
    """The columns that `penalised_rewards` reads beside `rewards`, to load: none with a weight of 0."""
    return _COLUMNS if kl else ()


def penalised_rewards(batch: Batch, kl: float) -> NDArray[np.float32]:
    """Each reward less `kl` times the KL of its row, `r - kl sum_t log(pi(y_t) / pi_ref(y_t))`, float32[rows].

    Reads `rewards` and, with `kl` above 0, `logprobs`, `reference_logprobs` and `loss_mask`: the sum is over the row's
    learned tokens. Raises DataError where one of them is missing or a log-prob is not finite.

    RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), whose baseline is of rewards that are lowered so:
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
        raise DataError(f"row {bad[0]} has log-probs that are not finite: its KL to the reference is no number")
    sums = np.bincount(row, distances, minlength=len(batch))
    return (batch.rewards.astype(np.float64) - kl * sums).astype(np.float32)


def kl_metrics(batch: Batch) -> dict[str, float]:
    """`reference_k1`: the mean of `log(pi / pi_ref)` over the learned tokens, which estimates the KL (k1), in nats.

    For `run.record`. Empty where the batch lacks a column, or one lies elsewhere: without a reference there is no KL.
    """
    if any(name not in batch or name in batch.elsewhere for name in _COLUMNS):
        return {}
    _, distances = _distances(batch)
    return {"reference_k1": float(distances.mean())} if len(distances) else {}


def _distances(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each learned token its row, and the policy's log-prob less the reference's."""
    mask = batch.loss_mask
    row = np.repeat(np.arange(len(mask)), mask.lengths)[np.asarray(mask.values, np.bool_)]
    own, reference = (learned_values(name, batch.ragged(name), mask) for name in _COLUMNS[1:])
    return row, own - reference
