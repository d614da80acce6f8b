"""Losses with the gradient of the log-probabilities: REINFORCE, and CISPO's weighted form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from meshrl.losses.base import TokenLoss, WithKl
from meshrl.losses.correction import Correction, importance_weights
from meshrl.losses.kl import kl_k3
from meshrl.losses.normalise import Normalise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ReinforceLoss(WithKl):
    """The loss of REINFORCE: minus the advantage times the log-probability of the row, which is a sum over its tokens.

    With a `correction` each token (or row, with `level = "sequence"`) is weighed by pi / pi_sampler, bounded, without a
    gradient: what rows of earlier versions ask for. Without one every row is taken as the policy's own.

    Reads `sampler_logprobs`, `advantages`; `reference_logprobs` where `kl` > 0.

    Diagnostics: `kl` (k3, of the policy from the sampler) and `reference_kl`. With a correction also `correction`,
    `correction_squared` and `correction_clipped`, as of `ClippedLoss`.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"; of whole
    completions: Ahmadian et al. 2024 (arXiv:2402.14740).
    """

    normalise: Normalise = "sequence-sum"
    correction: Correction | None = None
    """How rows of earlier versions are weighed; None: as the policy's own."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        rows = self.correction.columns if self.correction else ()
        return ("sampler_logprobs", "advantages", *self.reference_columns, *rows)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from the policy's log-probs and the columns, one entry a token."""
        sampler, now = columns["sampler_logprobs"], logprobs.detach()
        values = -(columns["advantages"] * logprobs)  # unsigned integers have no minus
        metrics = {"kl": kl_k3(sampler, now)}
        if self.correction:
            values, told = self.correction.apply(values, now, sampler, columns)
            metrics |= told
        return self.penalised(values, metrics, logprobs, columns)


class CispoLoss(WithKl):
    """The loss of CISPO: minus the clipped ratio, held fixed, times the advantage and the log-probability of the token.

    Where the clipped surrogate teaches a token beyond its bound nothing, this one still teaches it, with a bounded
    weight.

    Reads `sampler_logprobs`, `advantages`; `reference_logprobs` where `kl` > 0.

    Diagnostics: `ratio` (of the policy to the sampler), `clip_fraction`, `kl` (k3, of the policy from the sampler) and
    `reference_kl`.

    MiniMax-M1 (arXiv:2506.13585), the section on CISPO.
    """

    clip: float | None = Field(default=None, gt=0, lt=1)
    """The ratio is at least 1 less this; None: there is no lower bound, as in the paper's runs."""
    clip_high: float = Field(default=4.0, gt=0)
    """The ratio is at most 1 and this."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("sampler_logprobs", "advantages", *self.reference_columns)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from the policy's log-probs and the columns, one entry a token."""
        sampler, now = columns["sampler_logprobs"], logprobs.detach()
        ratio = importance_weights(now, sampler)
        weights = ratio.clamp(None if self.clip is None else 1 - self.clip, 1 + self.clip_high)
        values = -weights * columns["advantages"] * logprobs
        metrics = {"ratio": ratio, "clip_fraction": (weights != ratio).float(), "kl": kl_k3(sampler, now)}
        return self.penalised(values, metrics, logprobs, columns)
