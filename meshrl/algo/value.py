"""The loss of a critic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pydantic import Field

from meshrl.algo.base import Normalised, Predicts, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from meshrl.data import Metrics

_ROUNDING: Final = 1e-6
"""Relative rounding error of float32 sums: a variance below this share of the mean square counts as 0."""


class ValueLoss(Normalised):
    """The loss of a critic: half the squared error of its values, clipped around the old values if `clip` is set.

    Reads `values` and `returns`. Diagnostics: `value_error` (squared, not clipped), `value_clip_fraction`, and `value`,
    `return` and `return_squared`, from which `explained_variance` is computed.
    """

    clip: float | None = Field(default=None, gt=0)
    """Distance from the old value beyond which a value learns nothing more. Default: no limit."""

    @property
    def predicts(self) -> Predicts:
        """A critic's values."""
        return "values"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("values", "returns")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token, float[tokens]. `logprobs` are a critic's values here."""
        predicted, old, returns = logprobs, columns["values"], columns["returns"]
        values = clipped_value_error(predicted, old, returns, self.clip)
        detached = predicted.detach()
        error = (detached - returns).square()
        metrics = {
            "value_error": error,
            "value_clip_fraction": (2 * values.detach() > error).float(),
            "value": detached,
            "return": returns,
            "return_squared": returns.square(),
        }
        return TokenLoss(values, metrics)


def clipped_value_error(predicted: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Compute half the larger of two squared errors: of the value, and of the value clipped around the old one.

    `max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`, all float[tokens]. The gradient is zero if the
    value has moved towards the return by more than `clip`. With `clip = None`: `(V - R)^2 / 2`.

    Not in the PPO paper but in its published implementation (openai/baselines, ppo2); Huang et al. 2022, "The 37
    Implementation Details of Proximal Policy Optimization", detail 9.
    """
    error = (predicted - returns).square()
    if clip is not None:
        held = predicted.clamp(old - clip, old + clip)  # the same bits if it is within the bounds
        error = error.maximum((held - returns).square())
    return error / 2


def explained_variance(metrics: Metrics) -> float:
    """Compute the share of the returns' variance that the values explain: `1 - Var(R - V) / Var(R)`, at most 1.

    `metrics` are those of `ValueLoss`, over all their tokens. 0 for a critic that predicts the mean, negative for a
    worse one, and NaN if all returns are equal.
    """
    mean, bias = metrics["return"], metrics["return"] - metrics["value"]
    variance = metrics["return_squared"] - mean**2
    if variance <= _ROUNDING * metrics["return_squared"]:
        return math.nan
    return 1 - (metrics["value_error"] - bias**2) / variance
