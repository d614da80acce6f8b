"""The losses of a policy: the clipped surrogate, REINFORCE and their kin, maximum likelihood and distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from meshrl.algo.base import Normalise, Normalised, TokenLoss, WithKl, row_sums
from meshrl.algo.kl import MAX_LOG_RATIO, kl_k1, kl_k3
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
      (arXiv:2510.18855), whose M(k) this is. Only the surrogate is masked: a masked token still learns from the
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
        """Bound the weights, float[tokens]. Weights at a bound are kept."""
        if self.how == "truncate":
            return weights.clamp(self.low, self.high)
        outside = weights > self.high if self.low is None else (weights > self.high) | (weights < self.low)
        return weights.masked_fill(outside, 0)

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
    if rows is not None:
        log_weights = row_sums(log_weights, rows)
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def effective_sample_size(metrics: Metrics) -> float:
    """Compute the effective sample size of a corrected batch, as a fraction of its learned tokens: `E[w]^2 / E[w^2]`.

    `metrics` are those of an update whose loss has a `correction`, and w are the applied weights. 0 if every token was
    masked. Raises DataError for the metrics of another loss. Kong 1992, "A note on importance sampling using
    standardized weights".
    """
    mean, squared = metrics["correction"], metrics["correction_squared"]
    return mean**2 / squared if squared else 0.0


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
        ratio = importance_weights(logprobs.detach(), old)
        clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - self.clip))
        if self.dual_clip is not None:
            clipped = clipped | ((advantages < 0) & (ratio > self.dual_clip))
        metrics = {"ratio": ratio, "clip_fraction": clipped.float(), "kl": kl_k3(old, logprobs.detach())}
        if self.anchor == "trainer":
            metrics |= {"sampler_ratio": importance_weights(old, sampler), "sampler_kl": kl_k3(sampler, old)}
        if self.correction:
            values, weights = self.correction.apply(values, old, sampler, columns)
            metrics |= weights
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
    ratio = importance_weights(logprobs, old_logprobs)
    loss = (-ratio * advantages).maximum(-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)


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
    lengths = row_sums(log_ratios.new_ones(len(rows)), rows)
    return (row_sums(log_ratios, rows) / lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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
            values, weights = self.correction.apply(values, now, sampler, columns)
            metrics |= weights
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


class ReverseKl(Normalised):
    """The loss of on-policy distillation: KL(policy || teacher), estimated on the tokens that the policy sampled.

    Reads `sampler_logprobs`, and the teacher's log-probs as `reference_logprobs`.

    Diagnostics: `teacher_kl` (k1, not weighted; its mean over tokens of the policy is the KL) and `ratio` (of the
    policy to the sampler).
    """

    clip_high: float = Field(default=2.0, ge=1)
    """Upper bound of a token's importance weight, policy over sampler. It has no effect if both have the same
    weights."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("sampler_logprobs", "reference_logprobs")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        sampler, teacher = columns["sampler_logprobs"], columns["reference_logprobs"]
        now = logprobs.detach()
        values = reverse_kl(logprobs, sampler, teacher, self.clip_high)
        return TokenLoss(values, {"teacher_kl": kl_k1(now, teacher), "ratio": importance_weights(now, sampler)})


def reverse_kl(logprobs: Tensor, sampler: Tensor, teacher: Tensor, most: float = 2.0) -> Tensor:
    """Estimate KL(policy || teacher) from tokens of the sampler, with the KL's own gradient: `w (log p - log q)`.

    All tensors are float[tokens], and `w = min(p / sampler, most)`, which is 1 on the policy's own tokens. The gradient
    is `w (log p - log q)` times that of `log p`: a policy gradient with the advantage `log q - log p` for each token.
    The expected gradient of `kl_k1` would be zero, and that of `kl_k2` is this one. The effect of a token on later ones
    is not counted. This is the single-step term of MiniLLM (Gu et al. 2024, arXiv:2306.08543), with one sampled token
    instead of a sum over the vocabulary: equal in expectation, with more noise. See also "On-Policy Distillation"
    (Thinking Machines Lab 2025) and GKD (Agarwal et al. 2024, arXiv:2306.13649) with the reverse KL and only the
    student's tokens.
    """
    now = logprobs.detach()
    weight = importance_weights(now, sampler).clamp(max=most)
    one = (logprobs - now).exp()  # 1, with the gradient of the log-prob
    return one * weight * kl_k1(now, teacher)


class CrossEntropy(Normalised):
    """Maximum likelihood: minus the log-prob of each token, in nats. Reads no column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads: none."""
        return ()

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token. All inputs have shape [tokens]."""
        return TokenLoss(-logprobs, {})
