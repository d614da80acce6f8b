"""Importance weights for tokens whose sampling probabilities differ from the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshrl.algo.kl import MAX_LOG_RATIO
from meshrl.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from meshrl.data import Metrics


class Correction(Config):
    """Off-policy correction: weigh the surrogate of each token by pi_trainer / pi_sampler, and bound the weights.

    - `level = "token"`, `how = "truncate"`: truncated importance sampling (Yao et al. 2025, "Your Efficient RL
      Framework Secretly Brings You Off-Policy RL Training"). Without a bound, `high = inf`, it is decoupled PPO:
      Hilton et al. 2021 (arXiv:2110.00641); for language models AReaL (arXiv:2505.24298). AReaL's code drops the
      tokens above its cap, like `how = "mask"` without `low`.
    - `level = "token"`, `how = "mask"`, both bounds: IcePop. Ling Team 2025, "Every Step Evolves"
      (arXiv:2510.18855), where M(k) is `masked`. Only the surrogate is masked: a masked token still learns from the
      KL to the reference of a `ClippedLoss` with `kl` above 0.
    - `level = "sequence"`: the weight of a row is the product over its learned tokens. It is unbiased for the row,
      unlike the weights of single tokens, and has a higher variance.
    """

    level: Literal["token", "sequence"] = "token"
    """Weigh each token by its own ratio, or by the product of the ratios in its row."""
    how: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight outside the bounds: `truncate` moves it to the nearest bound, and `mask` sets it to 0,
    so that the token's surrogate is not learned."""
    low: float | None = Field(default=None, gt=0, le=1)
    """Lower bound of the weights. Default: no lower bound."""
    high: float = Field(ge=1)
    """Upper bound of the weights."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads in addition to log-probs."""
        return ("rows",) if self.level == "sequence" else ()

    def __call__(self, weights: Tensor) -> Tensor:
        """Bound the weights, float[tokens]."""
        bound = truncated if self.how == "truncate" else masked
        return bound(weights, self.low, self.high)

    def apply(
        self, values: Tensor, trainer: Tensor, sampler: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Weigh the loss of each token by the ratio of `trainer` to `sampler`, and return it with the diagnostics.

        `trainer` and `sampler` are log-probs. All tensors are float[tokens]. No gradient goes through the weights.
        """
        raw = importance_weights(trainer, sampler, columns["rows"] if self.level == "sequence" else None).detach()
        weights = self(raw)
        return values * weights, {
            "correction": weights,
            "correction_squared": weights.square(),
            "correction_clipped": (weights != raw).float(),
        }


def importance_weights(trainer: Tensor, sampler: Tensor, rows: Tensor | None = None) -> Tensor:
    """Compute the weight of each token, `pi_trainer / pi_sampler`, float[tokens], from log-probs float[tokens].

    `rows`, int64[tokens], is the number of each token's row, from 0 without gaps. With it, each token gets the product
    of the weights in its row. Weights are clamped to between exp(-20) and exp(20).
    """
    log_weights = trainer - sampler
    if rows is not None:  # there are at most as many rows as tokens, so no number is fetched from the device
        log_weights = log_weights.new_zeros(len(log_weights)).index_add(0, rows, log_weights)[rows]
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated(weights: Tensor, low: float | None, high: float) -> Tensor:
    """Clamp each weight to the bounds; float[tokens]."""
    return weights.clamp(low, high)


def masked(weights: Tensor, low: float | None, high: float) -> Tensor:
    """Keep each weight within the bounds (both included), and set the others to 0; float[tokens]."""
    outside = weights > high if low is None else (weights > high) | (weights < low)
    return weights.masked_fill(outside, 0)


def effective_sample_size(metrics: Metrics) -> float:
    """Compute the effective sample size of a corrected batch, as a fraction of its learned tokens: `E[w]^2 / E[w^2]`.

    `metrics` are those of an update whose loss has a `correction`, and w are the applied weights. 0 if every token was
    masked. Raises DataError for the metrics of another loss. Kong 1992, "A note on importance sampling using
    standardized weights".
    """
    mean, squared = metrics["correction"], metrics["correction_squared"]
    return mean**2 / squared if squared else 0.0
