"""Maximum likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.algo.base import Normalised, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class CrossEntropy(Normalised):
    """Maximum likelihood: minus the log-prob of each token. Reads no column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads: none."""
        return ()

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token, float[tokens]."""
        return TokenLoss(cross_entropy(logprobs), {})


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Compute minus the log-probability of each token, float[tokens], in nats."""
    return -logprobs
