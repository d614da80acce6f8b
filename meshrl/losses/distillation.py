"""On-policy distillation: the reverse KL to a teacher, on the student's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from meshrl.losses.base import Normalised, TokenLoss
from meshrl.losses.kl import MAX_LOG_RATIO, kl_k1

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ReverseKl(Normalised):
    """The loss of on-policy distillation: KL(policy || teacher), estimated on the tokens that the policy drew.

    Reads `sampler_logprobs` and `reference_logprobs`, the teacher's.

    Diagnostics: `teacher_kl` (k1, not weighted: over the policy's own tokens its mean is the KL), and `ratio` (of the
    policy to the sampler).
    """

    most: float = Field(default=2.0, ge=1)
    """The largest weight of a token that the policy finds more probable than the sampler did; it has no effect where
    both have the same weights."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("sampler_logprobs", "reference_logprobs")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from the policy's log-probs and the columns, one entry a token."""
        sampler, teacher = columns["sampler_logprobs"], columns["reference_logprobs"]
        now = logprobs.detach()
        ratio = (now - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        values = reverse_kl(logprobs, sampler, teacher, self.most)
        return TokenLoss(values, {"teacher_kl": kl_k1(now, teacher), "ratio": ratio})


def reverse_kl(logprobs: Tensor, sampler: Tensor, teacher: Tensor, most: float = 2.0) -> Tensor:
    """Estimate KL(policy || teacher) from tokens of the sampler, with the KL's own gradient: `w (log p - log q)`.

    All tensors are float[tokens]; `w = min(p / sampler, most)`, 1 on the policy's own tokens. The gradient is
    `w (log p - log q)` times that of `log p`: a policy gradient with the advantage `log q - log p` of each token. There
    `kl_k1` has an expected gradient of zero, and `kl_k2` this one. What a token does to later ones is not counted: the
    single step of MiniLLM (Gu et al. 2024, arXiv:2306.08543), which sums over the vocabulary where one drawn token
    stands for the sum here: equal in expectation, with more noise; and "On-Policy Distillation" (Thinking Machines Lab
    2025); GKD (Agarwal et al. 2024, arXiv:2306.13649) with the reverse KL and tokens of the student alone.
    """
    now = logprobs.detach()
    weight = (now - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=most)
    one = (logprobs - now).exp()  # 1, with the gradient of the log-prob
    return one * weight * kl_k1(now, teacher)
