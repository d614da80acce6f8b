"""The clipped surrogate of PPO and GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from meshrl.algo.base import TokenLoss, WithKl
from meshrl.algo.correction import Correction
from meshrl.algo.kl import MAX_LOG_RATIO, kl_k3
from meshrl.algo.normalise import Normalise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ClippedLoss(WithKl):
    """The loss of PPO and GRPO: the clipped surrogate, plus `kl` times the KL to a reference if `kl` > 0.

    A correction weighs the surrogate only. A token whose surrogate is masked still learns from the KL.

    Reads `sampler_logprobs` and `advantages`, `logprobs` with anchor "trainer", and `reference_logprobs` if `kl` > 0.

    Diagnostics: `ratio` (of the policy to the anchor), `clip_fraction`, `kl` (k3, between anchor and policy) and
    `reference_kl`. With anchor "trainer" also `sampler_ratio` and `sampler_kl`, which compare the anchor with the
    sampler. With a correction also `correction` and `correction_squared`, from which `effective_sample_size` is
    computed, and `correction_clipped`, the fraction of tokens whose weight was bounded.
    """

    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio to the old policy is clipped to between 1 - clip and 1 + clip."""
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above at 1 + clip_high, if this differs from `clip` (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound for the loss of a token with negative advantage, as a multiple of the advantage's size."""
    anchor: Literal["sampler", "trainer"] = "sampler"
    """Source of the old policy's log-probs: the sampler, or the trainer before its updates."""
    correction: Correction | None = None
    """How to correct the surrogate if the sampler's log-probs differ from the anchor's. Default: no correction."""

    @model_validator(mode="after")
    def _correction_where_it_corrects(self) -> Self:
        if self.correction is not None and self.anchor == "sampler":
            raise ValueError(
                'correction has no effect with anchor = "sampler": the weight pi_anchor / pi_sampler is 1, because the '
                'ratio to the sampler already corrects. Set anchor = "trainer", or remove correction'
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        anchor = ("logprobs",) if self.anchor == "trainer" else ()
        rows = self.correction.columns if self.correction else ()
        return (*anchor, "sampler_logprobs", "advantages", *self.reference_columns, *rows)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        sampler, advantages = columns["sampler_logprobs"], columns["advantages"]
        old = columns["logprobs"] if self.anchor == "trainer" else sampler
        high = self.clip if self.clip_high is None else self.clip_high
        values = clipped_surrogate(logprobs, old, advantages, self.clip, high, self.dual_clip)
        ratio = _ratio(logprobs.detach(), old)
        clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - self.clip))
        if self.dual_clip is not None:
            clipped = clipped | ((advantages < 0) & (ratio > self.dual_clip))
        metrics = {"ratio": ratio, "clip_fraction": clipped.float(), "kl": kl_k3(old, logprobs.detach())}
        if self.anchor == "trainer":
            metrics |= {"sampler_ratio": _ratio(old, sampler), "sampler_kl": kl_k3(sampler, old)}
        if self.correction:
            values, told = self.correction.apply(values, old, sampler, columns)
            metrics |= told
        return self.penalised(values, metrics, logprobs, columns)


class ConstantLoss(ClippedLoss):
    """The loss of Dr. GRPO (arXiv:2503.20783): the clipped surrogate, with each row's sum divided by `constant`.

    A `ClippedLoss` with another default of `normalise`. `constant` is required.
    """

    normalise: Normalise = "constant"
    """How token losses become one number. See `token_weights` for the formulas."""


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute minus PPO's clipped surrogate objective: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    All tensors are float[tokens], and `r = exp(logprobs - old_logprobs)`. The gradient is zero if the ratio has
    already passed its bound in the direction of the advantage. With `dual_clip` = c > 1, the loss of a token with
    negative advantage is at most `-c A`.

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; for the tokens of a group: GRPO, DeepSeekMath
    (arXiv:2402.03300), equation 3; two bounds: DAPO (arXiv:2503.14476), equation 10; dual clip: Ye et al.
    2019 (arXiv:1912.09729), DUALCLIP.
    """
    ratio = _ratio(logprobs, old_logprobs)
    loss = (-ratio * advantages).maximum(-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
