"""Estimators of the KL divergence of two policies, with one value for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

KlEstimator: TypeAlias = Literal["k2", "k3"]
"""The KL estimators for losses. k1 is not one of them: its expected gradient is zero."""

MAX_LOG_RATIO: Final = 20.0
"""Bound of log-ratios. exp(20) is 5e8, and larger ratios are useless: an infinite one times a zero weight is NaN."""


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `log p - log q`.

    float[tokens]. Unbiased, with high variance, negative for many tokens. Use it for reports and rewards. As a loss
    its expected gradient is zero. Schulman 2020, "Approximating KL Divergence", k1.
    """
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `(log p - log q)^2 / 2`.

    float[tokens]. Biased, with low variance, never negative. On the policy's own tokens its expected gradient is that
    of the KL. Schulman 2020, "Approximating KL Divergence", k2.
    """
    return (logprobs - reference).square() / 2


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from tokens of the policy: `q/p - 1 - log(q/p)`.

    float[tokens]. Unbiased, with low variance, never negative. As a loss its expected gradient on the policy's own
    tokens is that of KL(reference || policy). Schulman 2020, "Approximating KL Divergence", k3; GRPO, DeepSeekMath
    (arXiv:2402.03300), equation 4.
    """
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"k2": kl_k2, "k3": kl_k3}
