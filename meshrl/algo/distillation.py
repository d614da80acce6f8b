"""On-policy distillation: the reverse KL to a teacher, on the student's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from meshrl.algo.base import Normalised, TokenLoss
from meshrl.algo.kl import MAX_LOG_RATIO, kl_k1

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


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
        ratio = (now - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        values = reverse_kl(logprobs, sampler, teacher, self.clip_high)
        return TokenLoss(values, {"teacher_kl": kl_k1(now, teacher), "ratio": ratio})


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
    weight = (now - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=most)
    one = (logprobs - now).exp()  # 1, with the gradient of the log-prob
    return one * weight * kl_k1(now, teacher)
