"""The clipped surrogate of whole sequences: GSPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshrl.algo.base import TokenLoss, WithKl
from meshrl.algo.kl import MAX_LOG_RATIO, kl_k3
from meshrl.algo.normalise import Normalise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class SequenceLoss(WithKl):
    """The loss of GSPO: the clipped surrogate with one ratio for each row, the geometric mean of its tokens' ratios.

    With `s = (pi(y) / pi_old(y))^(1 / |y|)`, the loss of each token is
    `-min(s A, clip(s, 1 - clip, 1 + clip_high) A)`, where A is the row's advantage. With the default of `normalise`,
    the gradient is that of the paper's mean over rows.

    Reads `sampler_logprobs` and `advantages`, `logprobs` with anchor "trainer", and `reference_logprobs` if `kl` > 0.

    Diagnostics: `ratio` (of the row), `clip_fraction`, `kl` (k3, between anchor and policy), `reference_kl`.

    Zheng et al. 2025 (arXiv:2507.18071), equations 5 and 7. The default bounds are those of its experiments.
    """

    normalise: Normalise = "sequence-mean"
    """How token losses become one number. See `token_weights` for the formulas."""
    clip: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio of a row is clipped below at 1 - clip. It is a mean, and moves far less than a token's ratio."""
    clip_high: float | None = Field(default=4e-4, gt=0)
    """The ratio of a row is clipped above at 1 + clip_high. None: use `clip`."""
    anchor: Literal["sampler", "trainer"] = "sampler"
    """Source of the old policy's log-probs: the sampler, or the trainer before its updates."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        anchor = "logprobs" if self.anchor == "trainer" else "sampler_logprobs"
        return (anchor, "advantages", *self.reference_columns, "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        old, advantages = columns["logprobs" if self.anchor == "trainer" else "sampler_logprobs"], columns["advantages"]
        ratio = sequence_ratios(logprobs, old, columns["rows"])
        low, high = 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)
        values = (-ratio * advantages).maximum(-ratio.clamp(low, high) * advantages)
        now = ratio.detach()
        clipped = ((advantages > 0) & (now > high)) | ((advantages < 0) & (now < low))
        metrics = {"ratio": now, "clip_fraction": clipped.float(), "kl": kl_k3(old, logprobs.detach())}
        return self.penalised(values, metrics, logprobs, columns)


def sequence_ratios(logprobs: Tensor, old: Tensor, rows: Tensor) -> Tensor:
    """Compute the geometric mean of the ratios in each token's row, float[tokens], with a gradient.

    `rows`, int64[tokens], is the number of each token's row, from 0 without gaps. Ratios are clamped to between
    exp(-20) and exp(20). GSPO (arXiv:2507.18071), equation 7.
    """
    log_ratios = logprobs - old
    sums = log_ratios.new_zeros(len(rows)).index_add(0, rows, log_ratios)  # there are no more rows than tokens
    counts = log_ratios.new_zeros(len(rows)).index_add(0, rows, log_ratios.new_ones(len(rows)))
    return (sums[rows] / counts[rows]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
