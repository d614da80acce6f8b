"""The KL divergence of two policies: estimators for losses, a penalty on rewards, and a metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from meshrl.algo.columns import learned_rows, learned_values
from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from meshrl.data import Batch

KlEstimator: TypeAlias = Literal["k2", "k3"]
"""The KL estimators for losses. k1 is not one of them: its expected gradient is zero."""

MAX_LOG_RATIO: Final = 20.0
"""Bound of log-ratios. exp(20) is 5e8, and larger ratios are useless: an infinite one times a zero weight is NaN."""


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `log p - log q`.

    float[tokens]. Unbiased, with high variance, negative for many tokens. Use it for reports and rewards. As a loss
    its expected gradient is zero. Schulman 2020, "Approximating KL Divergence", k1.
    """
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `(log p - log q)^2 / 2`.

    float[tokens]. Biased, with low variance, never negative. On the policy's own tokens its expected gradient is that
    of the KL. Schulman 2020, "Approximating KL Divergence", k2.
    """
    return (logprobs - reference).square() / 2


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `q/p - 1 - log(q/p)`.

    float[tokens]. Unbiased, with low variance, never negative. As a loss its expected gradient on the policy's own
    tokens is that of KL(reference || policy). Schulman 2020, "Approximating KL Divergence", k3; GRPO, DeepSeekMath
    (arXiv:2402.03300), equation 4.
    """
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"k2": kl_k2, "k3": kl_k3}
KL_COLUMNS: Final = ("loss_mask", "logprobs", "reference_logprobs")
"""The columns from which the KL to a reference is computed."""


def kl_columns(kl: float) -> tuple[str, ...]:
    """Return the columns that `penalised_rewards` reads in addition to `rewards`, to load them. None if `kl` is 0."""
    return KL_COLUMNS if kl else ()


def penalised_rewards(batch: Batch, kl: float) -> NDArray[np.float32]:
    """Subtract `kl` times the row's KL from each reward: `r - kl sum_t log(pi(y_t) / pi_ref(y_t))`, float32[rows].

    Reads `rewards`, and `logprobs`, `reference_logprobs` and `loss_mask` if `kl` is above 0. The sum is over the row's
    learned tokens. Raises DataError if a column is missing or a log-prob is not finite.

    RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), computes its baseline from such rewards:
    `leave_one_out(penalised_rewards(batch, kl), batch.groups)`.
    """
    if not kl:
        return batch.rewards
    missing = [name for name in KL_COLUMNS if name not in batch]
    if missing:
        raise DataError(
            f"kl = {kl:g} lowers rewards by the KL of `logprobs` from `reference_logprobs`, and the batch has no "
            f"`{'`, `'.join(missing)}`: call policy.logprobs and reference.logprobs before, or set kl = 0"
        )
    sums = log_ratios(batch)
    if len(bad := np.flatnonzero(~np.isfinite(sums))):
        raise DataError(f"row {bad[0]} has log-probs that are not finite: its KL to the reference is not a number")
    return (batch.rewards.astype(np.float64) - kl * sums).astype(np.float32)


def kl_metrics(batch: Batch) -> dict[str, float]:
    """Compute `reference_k1`, the mean of `log(pi / pi_ref)` over learned tokens, in nats: the k1 estimate of the KL.

    For `run.record`. Empty if the batch lacks a column or if one is remote: without a reference there is no KL.
    """
    if any(name not in batch or name in batch.elsewhere for name in KL_COLUMNS):
        return {}
    ratios = _token_log_ratios(batch)
    return {"reference_k1": float(ratios.mean())} if len(ratios) else {}


def log_ratios(batch: Batch) -> NDArray[np.float64]:
    """Compute `log pi(y|x) / ref(y|x)` of each row: `logprobs` minus `reference_logprobs`, summed over learned tokens.

    Returns float64[rows] in nats, 0 for a row without learned tokens.
    """
    sums = np.bincount(learned_rows(batch.loss_mask), _token_log_ratios(batch), minlength=len(batch))
    return sums.astype(np.float64, copy=False)  # bincount gives integers if there are no tokens


def _token_log_ratios(batch: Batch) -> NDArray[np.float64]:
    own, reference = (learned_values(name, batch.ragged(name), batch.loss_mask) for name in KL_COLUMNS[1:])
    return own - reference
