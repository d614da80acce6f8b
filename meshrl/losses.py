"""Losses of one token each, as pure functions, and how they are normalised over the global batch.

Tensors are 1-d: one entry a token of a packed micro-batch. What turns a micro-batch's tokens into one number
is `token_weights`, which knows the global batch; so the gradient does not depend on how rows were divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from meshrl.config import Config
from meshrl.errors import ConfigError, DataError

if TYPE_CHECKING:  # the core loads no torch: these functions call methods of the tensors they are given
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from meshrl.ragged import Ragged

Normalise: TypeAlias = Literal["token-mean", "sequence-mean", "constant"]
"""How a batch's token losses become one number; see `token_weights`."""

KlEstimator: TypeAlias = Literal["k2", "k3"]
"""The KL estimators that may stand in a loss. k1 may not: its expected gradient is zero."""

_MAX_LOG_RATIO: Final = 20.0
"""exp(20) is 5e8: a larger ratio has no use, and an infinite one times a zero advantage or weight is NaN."""


@dataclass(frozen=True)
class TokenLoss:
    """What a loss says of each token.

    `values` is float[tokens] with a gradient; `metrics` are diagnostics, float[tokens] without one, which the
    backend averages over the tokens that are learned.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


class Loss(Protocol):
    """A loss that `Policy.update` minimises: any object with these, a frozen dataclass for example."""

    @property
    def normalise(self) -> Normalise:
        """How the token losses become one number."""
        ...

    @property
    def constant(self) -> int | None:
        """The divisor of `normalise="constant"`, in tokens; None for the other normalisations."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads: one value a token, or one a row, spread over the row's tokens."""
        ...

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from the policy's log-probs and the columns, all float[tokens]."""
        ...


class _Normalised(Config):
    normalise: Normalise = "token-mean"
    """How the token losses become one number: `token_weights` has the formulas."""
    constant: int | None = Field(default=None, ge=1)
    """The divisor of `normalise="constant"`: the most tokens a completion may have."""

    @model_validator(mode="after")
    def _constant_where_it_is_used(self) -> Self:
        if mistake := _constant_mistake(self.normalise, self.constant):
            raise ValueError(mistake)
        return self


class ClippedLoss(_Normalised):
    """The loss of PPO and GRPO: the clipped surrogate, and `kl` times the KL to a reference where `kl` > 0.

    Reads `sampler_logprobs`, `advantages`, and `reference_logprobs` where `kl` > 0. Diagnostics: `ratio`,
    `clip_fraction`, `kl` (k3, of the policy from the sampler) and `reference_kl`.
    """

    clip: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    """The upper bound where it differs from the lower (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token of negative advantage by this many times the advantage."""
    kl: float = Field(default=0.0, ge=0)
    """The weight of the KL to the reference."""
    kl_estimator: KlEstimator = "k3"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        reference = ("reference_logprobs",) if self.kl else ()
        return ("sampler_logprobs", "advantages", *reference)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from the policy's log-probs and the columns, all float[tokens]."""
        old, advantages = columns["sampler_logprobs"], columns["advantages"]
        high = self.clip if self.clip_high is None else self.clip_high
        values = clipped_surrogate(logprobs, old, advantages, self.clip, high, self.dual_clip)
        ratio = _ratio(logprobs.detach(), old)
        clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - self.clip))
        if self.dual_clip is not None:
            clipped = clipped | ((advantages < 0) & (ratio > self.dual_clip))
        metrics = {"ratio": ratio, "clip_fraction": clipped.float(), "kl": kl_k3(old, logprobs.detach())}
        if self.kl:
            to_reference = _KL[self.kl_estimator](logprobs, columns["reference_logprobs"])
            values = values + self.kl * to_reference
            metrics["reference_kl"] = to_reference.detach()
        return TokenLoss(values, metrics)


class CrossEntropy(_Normalised):
    """Maximum likelihood: minus the log-prob of each token. Reads no column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads: none."""
        return ()

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, float[tokens]."""
        return TokenLoss(cross_entropy(logprobs), {})


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Minus PPO's clipped surrogate objective: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    All tensors are float[tokens]; `r = exp(logprobs - old_logprobs)`. The gradient is zero where the ratio
    has already moved past its bound in the direction that the advantage asks for. With `dual_clip` = c > 1,
    the loss of a negative advantage is at most `-c A`.

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; for the tokens of a group: GRPO, DeepSeekMath
    (arXiv:2402.03300), equation 3; two bounds: DAPO (arXiv:2503.14476), equation 10; dual clip: Ye et al.
    2019 (arXiv:1912.09729), DUALCLIP.
    """
    ratio = _ratio(logprobs, old_logprobs)
    loss = (-ratio * advantages).maximum(-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `log p - log q`.

    float[tokens]. Unbiased, of high variance, negative for many tokens. For reports and rewards: as a loss
    its expected gradient is zero. Schulman 2020, "Approximating KL Divergence", k1.
    """
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `(log p - log q)^2 / 2`.

    float[tokens]. Biased, of low variance, never negative; on the policy's own tokens its expected gradient
    is that of the KL. Schulman 2020, "Approximating KL Divergence", k2.
    """
    return (logprobs - reference).square() / 2


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `q/p - 1 - log(q/p)`.

    float[tokens]. Unbiased, of low variance, never negative. Schulman 2020, "Approximating KL Divergence",
    k3; GRPO, DeepSeekMath (arXiv:2402.03300), equation 4.
    """
    log_ratio = (reference - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Minus the log-probability of each token, float[tokens], in nats."""
    return -logprobs


def token_weights(
    loss_mask: Ragged, normalise: Normalise, *, tokens: int, rows: int, constant: int | None = None
) -> NDArray[np.float32]:
    """The weight of each token: the loss is `sum(weights * losses)` over all ranks and micro-batches.

    `loss_mask` (bool) is of some of the global batch's rows. The answer is float32[tokens of these rows],
    zero where the mask is False. `tokens` is the number of learned tokens of the global batch, `rows` the
    number of its rows that have any.

    - "token-mean": `1 / tokens`; long rows weigh more. DAPO (arXiv:2503.14476), equation 12.
    - "sequence-mean": `1 / (rows * learned tokens of the row)`; rows weigh the same. DeepSeekMath
      (arXiv:2402.03300), equation 3.
    - "constant": `1 / (rows * constant)`, where `constant` is the most tokens a completion may have: no
      bias to length. Dr. GRPO (arXiv:2503.20783), section 3.

    Raises ConfigError where `constant` is missing or has no effect, and DataError where the totals are less
    than these rows' own.
    """
    if mistake := _constant_mistake(normalise, constant):
        raise ConfigError(mistake)
    mask = np.asarray(loss_mask.values, dtype=np.bool_)
    row = np.repeat(np.arange(len(loss_mask)), loss_mask.lengths)
    learned = np.bincount(row[mask], minlength=len(loss_mask))
    _check_totals(int(learned.sum()), int((learned > 0).sum()), tokens, rows)
    divisor: NDArray[np.int64]
    match normalise:
        case "token-mean":
            divisor = np.full(len(loss_mask), tokens)
        case "sequence-mean":
            divisor = rows * learned
        case "constant":
            divisor = np.full(len(loss_mask), rows * (constant or 0))
    weights = np.zeros(len(mask), np.float32)
    weights[mask] = 1 / divisor[row[mask]]
    return weights


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _constant_mistake(normalise: Normalise, constant: int | None) -> str | None:
    if normalise == "constant" and constant is None:
        return (
            'normalise = "constant" divides by `constant` tokens, which is not set: '
            "set it to the most tokens a completion may have"
        )
    if normalise != "constant" and constant is not None:
        return f'constant = {constant} has no effect with normalise = "{normalise}": remove one of them'
    return None


def _check_totals(own_tokens: int, own_rows: int, tokens: int, rows: int) -> None:
    if own_tokens > tokens or own_rows > rows:
        raise DataError(
            f"token_weights: these rows alone have {own_tokens} learned tokens in {own_rows} rows, more than "
            f"the {tokens} tokens and {rows} rows given for the global batch. "
            "Sum both over all ranks and micro-batches."
        )


_KL: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"k2": kl_k2, "k3": kl_k3}
