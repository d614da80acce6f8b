"""The clipped surrogate of whole sequences: GSPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshrl.losses.base import TokenLoss, WithKl
from meshrl.losses.kl import MAX_LOG_RATIO, kl_k3
from meshrl.losses.normalise import Normalise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class SequenceLoss(WithKl):
    """The loss of GSPO: the clipped surrogate with one ratio a row, the geometric mean of its tokens' ratios.

    `s = (pi(y) / pi_old(y))^(1 / |y|)`, and of each token `-min(s A, clip(s, 1 - clip, 1 + clip_high) A)`. With the
    default of `normalise` that is the paper's mean over rows, to the gradient. The advantage is the row's.

    Reads `sampler_logprobs`, `advantages`; `logprobs` with anchor "trainer"; `reference_logprobs` where `kl` > 0.

    Diagnostics: `ratio` (of the row), `clip_fraction`, `kl` (k3, of the policy from the anchor), `reference_kl`.

    Zheng et al. 2025 (arXiv:2507.18071), equations 5 and 7; the bounds of its experiments are the defaults.
    """

    normalise: Normalise = "sequence-mean"
    clip: float = Field(default=3e-4, gt=0, lt=1)
    """How far below 1 the ratio of a row may be. It is a mean, and moves far less than a token's."""
    clip_high: float | None = Field(default=4e-4, gt=0)
    """How far above 1 it may be; None: as `clip`."""
    anchor: Literal["sampler", "trainer"] = "sampler"
    """Whose log-probs are the old policy's: the sampler's, or those the trainer computed before its updates."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        anchor = "logprobs" if self.anchor == "trainer" else "sampler_logprobs"
        return (anchor, "advantages", *self.reference_columns, "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from the policy's log-probs and the columns, one entry a token."""
        old, advantages = columns["logprobs" if self.anchor == "trainer" else "sampler_logprobs"], columns["advantages"]
        ratio = sequence_ratios(logprobs, old, columns["rows"])
        low, high = 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)
        values = (-ratio * advantages).maximum(-ratio.clamp(low, high) * advantages)
        now = ratio.detach()
        clipped = ((advantages > 0) & (now > high)) | ((advantages < 0) & (now < low))
        metrics = {"ratio": now, "clip_fraction": clipped.float(), "kl": kl_k3(old, logprobs.detach())}
        return self.penalised(values, metrics, logprobs, columns)


def sequence_ratios(logprobs: Tensor, old: Tensor, rows: Tensor) -> Tensor:
    """The geometric mean of the ratios of a row's tokens, the same for each of them, float[tokens], with a gradient.

    `rows`, int64[tokens], is the number of each token's row from 0 without gaps. A ratio is within exp(20) and
    exp(-20).
    GSPO (arXiv:2507.18071), equation 7.
    """
    log_ratios = logprobs - old
    sums = log_ratios.new_zeros(len(rows)).index_add(0, rows, log_ratios)  # there are no more rows than tokens
    counts = log_ratios.new_zeros(len(rows)).index_add(0, rows, log_ratios.new_ones(len(rows)))
    return (sums[rows] / counts[rows]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
