"""Corrections for tokens that were sampled with other probabilities than the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshrl.config import Config
from meshrl.losses.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from meshrl.data import Metrics


class Correction(Config):
    """How the surrogate of each token is weighted by pi_trainer / pi_sampler, and how large weights are bounded.

    - `level = "token"`, `how = "truncate"`: truncated importance sampling (Yao et al. 2025, "Your Efficient RL
      Framework Secretly Brings You Off-Policy RL Training"). Without a bound, `high = inf`, it is decoupled PPO:
      Hilton et al. 2021 (arXiv:2110.00641); for language models AReaL (arXiv:2505.24298), whose code drops the tokens
      above its cap, as `how = "mask"` without `low` does.
    - `level = "token"`, `how = "mask"`, both bounds: IcePop. Ling Team 2025, "Every Step Evolves"
      (arXiv:2510.18855), where M(k) is `masked`. It masks the surrogate alone: a masked token still learns from the KL
      to the reference of a `ClippedLoss` with `kl` above 0.
    - `level = "sequence"`: the weight of a row is that of all its learned tokens together, which is unbiased for the
      row where a token's is not, and varies more.
    """

    level: Literal["token", "sequence"] = "token"
    """Whether a token is weighted by its own ratio or by the product of its row's."""
    how: Literal["truncate", "mask"] = "truncate"
    """Whether a weight outside the bounds becomes the nearest bound, or 0: the surrogate then teaches nothing."""
    low: float | None = Field(default=None, gt=0, le=1)
    """The lower bound; None: there is none."""
    high: float = Field(ge=1)
    """The upper bound."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads beside log-probs."""
        return ("rows",) if self.level == "sequence" else ()

    def __call__(self, weights: Tensor) -> Tensor:
        """The weights within the bounds, float[tokens]."""
        bound = truncated if self.how == "truncate" else masked
        return bound(weights, self.low, self.high)

    def apply(
        self, values: Tensor, trainer: Tensor, sampler: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of each token, weighted by what `trainer` and `sampler`, log-probs, differ by; and the diagnostics.

        All are float[tokens]; no gradient goes through the weights.
        """
        raw = importance_weights(trainer, sampler, columns["rows"] if self.level == "sequence" else None).detach()
        weights = self(raw)
        return values * weights, {
            "correction": weights,
            "correction_squared": weights.square(),
            "correction_clipped": (weights != raw).float(),
        }


def importance_weights(trainer: Tensor, sampler: Tensor, rows: Tensor | None = None) -> Tensor:
    """The weight of each token, `pi_trainer / pi_sampler`, float[tokens], from log-probs float[tokens].

    With `rows`, int64[tokens], the number of each token's row from 0 without gaps: the product over the tokens of its
    row, the same for each of them. A weight is within exp(20) and exp(-20).
    """
    log_weights = trainer - sampler
    if rows is not None:  # there are no more rows than tokens, so that no number is fetched from the device
        log_weights = log_weights.new_zeros(len(log_weights)).index_add(0, rows, log_weights)[rows]
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated(weights: Tensor, low: float | None, high: float) -> Tensor:
    """Each weight, or the bound that it is beyond; float[tokens]."""
    return weights.clamp(low, high)


def masked(weights: Tensor, low: float | None, high: float) -> Tensor:
    """Each weight within the bounds (both included), and 0 for the others; float[tokens]."""
    outside = weights > high if low is None else (weights > high) | (weights < low)
    return weights.masked_fill(outside, 0)


def effective_sample_size(metrics: Metrics) -> float:
    """What fraction of the learned tokens the corrected batch is worth, from 0 to 1: `E[w]^2 / E[w^2]`.

    From the metrics of an update whose loss has a `correction`, w being the weights as they were applied; DataError
    from another. 0 where every token was masked. Kong 1992, "A note on importance sampling using standardized weights".
    """
    mean, squared = metrics["correction"], metrics["correction_squared"]
    return mean**2 / squared if squared else 0.0
