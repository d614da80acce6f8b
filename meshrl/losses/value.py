"""The loss of a critic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pydantic import Field

from meshrl.losses.base import Normalised, Predicts, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from meshrl.data import Metrics

_ROUNDING: Final = 1e-6
"""Of sums of float32: a variance this small beside the mean square is no variance."""


class ValueLoss(Normalised):
    """Half the squared error of a critic's values to the returns, clipped around the old values where `clip` is given.

    Reads `values` and `returns`. Diagnostics: `value_error` (squared, not clipped), `value_clip_fraction`, and `value`,
    `return` and `return_squared`, of which `explained_variance` is made.
    """

    clip: float | None = Field(default=None, gt=0)
    """How far a value may move from the old one before it learns no more; None: any way."""

    @property
    def predicts(self) -> Predicts:
        """A critic's values."""
        return "values"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("values", "returns")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, float[tokens]; what a policy's loss is given as `logprobs` are a critic's values."""
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
    """Half the larger of two squared errors: of the value, and of the value held within `clip` of the old one.

    `max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`, all float[tokens]. The gradient is zero where the
    value has moved towards the return by more than `clip`. With None: `(V - R)^2 / 2`.

    Not in the paper of PPO but in its published implementation (openai/baselines, ppo2); Huang et al. 2022, "The 37
    Implementation Details of Proximal Policy Optimization", detail 9.
    """
    error = (predicted - returns).square()
    if clip is not None:
        held = predicted.clamp(old - clip, old + clip)  # itself where it is within, to the bit
        error = error.maximum((held - returns).square())
    return error / 2


def explained_variance(metrics: Metrics) -> float:
    """How much of the returns' variance the values explain: `1 - Var(R - V) / Var(R)`, at most 1.

    From the metrics of `ValueLoss`, over all tokens that they count. 0 for a critic that knows the mean alone, less for
    one that knows less; NaN where all returns are equal.
    """
    mean, bias = metrics["return"], metrics["return"] - metrics["value"]
    variance = metrics["return_squared"] - mean**2
    if variance <= _ROUNDING * metrics["return_squared"]:
        return math.nan
    return 1 - (metrics["value_error"] - bias**2) / variance
