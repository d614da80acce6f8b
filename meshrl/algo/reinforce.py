"""Losses with the gradient of the log-probabilities: REINFORCE, and CISPO's weighted form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from meshrl.algo.base import TokenLoss, WithKl
from meshrl.algo.correction import Correction, importance_weights
from meshrl.algo.kl import kl_k3
from meshrl.algo.normalise import Normalise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ReinforceLoss(WithKl):
    """The loss of REINFORCE: minus the advantage times the log-probability of the row, summed over its tokens.

    With a `correction`, each token (or row, with `level = "sequence"`) is weighed by pi / pi_sampler, bounded, without
    a gradient. Use it for rows that earlier versions of the policy sampled. Without a correction, every row counts as
    sampled by the current policy.

    Reads `sampler_logprobs` and `advantages`, and `reference_logprobs` if `kl` > 0.

    Diagnostics: `kl` (k3, between sampler and policy) and `reference_kl`. With a correction also `correction`,
    `correction_squared` and `correction_clipped`, as in `ClippedLoss`.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"; for
    whole completions: Ahmadian et al. 2024 (arXiv:2402.14740).
    """

    normalise: Normalise = "sequence-sum"
    """How token losses become one number. See `token_weights` for the formulas."""
    correction: Correction | None = None
    """How to weigh rows of earlier versions. Default: as if the current policy had sampled them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        rows = self.correction.columns if self.correction else ()
        return ("sampler_logprobs", "advantages", *self.reference_columns, *rows)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        sampler, now = columns["sampler_logprobs"], logprobs.detach()
        values = -(columns["advantages"] * logprobs)  # unsigned integers cannot be negated
        metrics = {"kl": kl_k3(sampler, now)}
        if self.correction:
            values, told = self.correction.apply(values, now, sampler, columns)
            metrics |= told
        return self.penalised(values, metrics, logprobs, columns)


class CispoLoss(WithKl):
    """The loss of CISPO: minus the clipped ratio, without a gradient, times the token's advantage and log-probability.

    A token whose ratio is beyond the bound still learns, with a bounded weight. With the clipped surrogate it would
    learn nothing.

    Reads `sampler_logprobs` and `advantages`, and `reference_logprobs` if `kl` > 0.

    Diagnostics: `ratio` (of the policy to the sampler), `clip_fraction`, `kl` (k3, between sampler and policy) and
    `reference_kl`.

    MiniMax-M1 (arXiv:2506.13585), the section on CISPO.
    """

    clip: float | None = Field(default=None, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip. Default: no lower bound, as in the paper's runs."""
    clip_high: float = Field(default=4.0, gt=0)
    """The ratio is clipped above at 1 + clip_high."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("sampler_logprobs", "advantages", *self.reference_columns)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        sampler, now = columns["sampler_logprobs"], logprobs.detach()
        ratio = importance_weights(now, sampler)
        weights = ratio.clamp(None if self.clip is None else 1 - self.clip, 1 + self.clip_high)
        values = -weights * columns["advantages"] * logprobs
        metrics = {"ratio": ratio, "clip_fraction": (weights != ratio).float(), "kl": kl_k3(sampler, now)}
        return self.penalised(values, metrics, logprobs, columns)
