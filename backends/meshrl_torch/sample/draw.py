"""Sample the next token, with one uniform number for each row and token, regardless of the row's slot."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.errors import ModelError
from meshrl.roles import Sampling

UInt64 = NDArray[np.uint64]


def key(*parts: int) -> UInt64:
    """Hash the parts in their order to one uint64[]."""
    mixed = np.zeros((), np.uint64)
    for part in parts:
        mixed = mix(mixed + np.array(part & 0xFFFF_FFFF_FFFF_FFFF, np.uint64))
    return mixed


def mix(state: UInt64) -> UInt64:
    """Apply Splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    with np.errstate(over="ignore"):
        mixed = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Draw:
    """How tokens are sampled in one call of `generate`."""

    sampling: Sampling
    seed: UInt64
    """uint64[], or uint64[B] by row: determines the random numbers."""

    @property
    def temperature(self) -> float:
        """The divisor of logits in the reported log-probs: 1 for greedy sampling."""
        return self.sampling.temperature or 1.0

    def __call__(
        self, logits: Tensor, rows: NDArray[np.int64], places: NDArray[np.int64], versions: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Sample the next token, int64[B], with its log-probability, float32[B], from float32[B, vocabulary].

        `rows` and `places` are int64[B]: the row in the call, and the token in the row. `top_k` and `top_p` restrict
        sampling. The log-probability is that of the whole distribution at the temperature. ModelError if the weights,
        of these versions, int64[B], give a NaN or an infinite logit.
        """
        logprobs = (logits / self.temperature if self.temperature != 1 else logits).log_softmax(-1)
        broken = np.flatnonzero(logprobs[:, 0].isnan().numpy())  # one such logit makes the whole row NaN
        if len(broken):
            raise ModelError(
                f"row {rows[broken[0]]} has logits that are not finite, by weights of version {versions[broken[0]]}: "
                "training has broken the model, or its folder has such weights. Resume from a checkpoint, with a lower "
                "policy.optimizer.lr"
            )
        if self.sampling.temperature == 0:
            tokens = logprobs.argmax(-1, keepdim=True)
        else:
            uniform = torch.from_numpy(uniforms(self.seed, rows, places))[:, None]
            tokens = self._drawn(logprobs, uniform)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

    def _drawn(self, logprobs: Tensor, uniform: Tensor) -> Tensor:
        """Invert the cumulative distribution at the uniform numbers: int64[B, 1]."""
        probabilities = logprobs.exp()
        if not self.sampling.top_k and self.sampling.top_p == 1:
            return _inverse(probabilities, uniform)
        # Sorted by falling probability, the kept tokens come first in each row.
        ordered, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        if self.sampling.top_k:
            ordered, ids = ordered[:, : self.sampling.top_k], ids[:, : self.sampling.top_k]
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= self.sampling.top_p * ordered.sum(-1, keepdim=True), 0)
        return ids.gather(1, _inverse(ordered, uniform))


def _inverse(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the uniform number times the total.

    Both are float32, and a uniform number is at most 1 - 2**-23, so the product is less than the total and a token of
    probability 0 is never sampled.
    """
    cumulative = probabilities.cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)


def uniforms(seed: UInt64, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return a number in [0, 1) of 23 bits for each row and place, float32[B], without state.

    Splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), keyed by seed, then row, then place.
    """
    mixed = mix(mix(seed + rows.astype(np.uint64)) + places.astype(np.uint64))
    return (mixed >> np.uint64(41)).astype(np.float32) * np.float32(2**-23)
