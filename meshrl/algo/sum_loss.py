"""Losses that are sums over tokens: each token brings its own weight, and no normalisation is left to the trainer.

The scale of a gradient is in the columns, so rows may come in any number of calls. They are the built-in losses of the
Tinker API (tinker-docs.thinkingmachines.ai/losses), by the formulas of their papers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from meshrl.algo.base import Normalise, Predicts, TokenLoss, row_sums
from meshrl.algo.kl import MAX_LOG_RATIO
from meshrl.algo.policy_loss import clipped_surrogate, importance_weights
from meshrl.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class SumLoss(Config, ABC):
    """The base of losses whose number is the sum over the learned tokens. They report no other metrics."""

    @property
    def predicts(self) -> Predicts:
        """A policy's log-probs."""
        return "logprobs"

    @property
    def normalise(self) -> Normalise:
        """The sum over tokens."""
        return "sum"

    @property
    def constant(self) -> None:
        """None: nothing is divided."""
        return

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("sampler_logprobs", "advantages")

    @abstractmethod
    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""


class _Bounded(SumLoss):
    """The base of losses with bounds for a ratio."""

    low: float = Field(default=0.8, ge=0, le=1)
    """Lower bound of the ratio."""
    high: float = Field(default=1.2, ge=1)
    """Upper bound of the ratio."""

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.low == self.high:
            raise ValueError("low and high are both 1, so that no ratio is left: lower `low`, or raise `high`")
        return self


class WeightedCrossEntropy(SumLoss):
    """Maximum likelihood with a weight for each token: `-weight log p`. A weight may be negative. Reads `weights`.

    With the gradients of any loss as weights, this has the gradient of that loss.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("weights",)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        return TokenLoss(-columns["weights"] * logprobs, {})


class ImportanceLoss(SumLoss):
    """REINFORCE with importance sampling: `-r A`, with `r = p / sampler`. Reads `sampler_logprobs` and `advantages`."""

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        return TokenLoss(-importance_weights(logprobs, columns["sampler_logprobs"]) * columns["advantages"], {})


class ClippedSum(_Bounded):
    """PPO's clipped surrogate: `-min(r A, clip(r, low, high) A)`. Reads `sampler_logprobs` and `advantages`.

    Schulman et al. 2017 (arXiv:1707.06347), equation 7.
    """

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        old, advantages = columns["sampler_logprobs"], columns["advantages"]
        return TokenLoss(clipped_surrogate(logprobs, old, advantages, 1 - self.low, self.high - 1), {})


class CispoSum(_Bounded):
    """CISPO: `-clip(r, low, high) A log p`, no gradient through r. Reads `sampler_logprobs` and `advantages`.

    MiniMax-M1 (arXiv:2506.13585).
    """

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        ratio = importance_weights(logprobs.detach(), columns["sampler_logprobs"]).clamp(self.low, self.high)
        return TokenLoss(-ratio * columns["advantages"] * logprobs, {})


class DroLoss(SumLoss):
    """Direct reward optimisation: `-(A log p - beta / 2 (log r)^2)`. Reads `sampler_logprobs` and `advantages`.

    The advantages are the soft ones of the paper. Richemond et al. 2024 (arXiv:2405.19107).
    """

    beta: float = Field(default=0.05, ge=0)
    """Weight of the quadratic penalty."""

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        penalty = (logprobs - columns["sampler_logprobs"]).square() * (self.beta / 2)
        return TokenLoss(penalty - columns["advantages"] * logprobs, {})


class GspoSum(_Bounded):
    """GSPO-token: the clipped surrogate whose ratio has a row's value and the token's own gradient.

    The value is the geometric mean of the ratios of the row's tokens that `ratio_mask` marks. Also reads
    `sampler_logprobs` and `advantages`. Zheng et al. 2025 (arXiv:2507.18071), equations 7 and 14.
    """

    low: float = Field(default=1 - 3e-4, ge=0, le=1)
    """Lower bound of the ratio."""
    high: float = Field(default=1 + 4e-4, ge=1)
    """Upper bound of the ratio."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("sampler_logprobs", "advantages", "ratio_mask", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        advantages, rows = columns["advantages"], columns["rows"]
        counted, now = (columns["ratio_mask"] != 0).to(logprobs.dtype), logprobs.detach()
        differences = row_sums((now - columns["sampler_logprobs"]) * counted, rows)
        mean = (differences / row_sums(counted, rows).clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = (mean + logprobs - now).exp()
        return TokenLoss((-ratio * advantages).maximum(-ratio.clamp(self.low, self.high) * advantages), {})
