"""Prove that weights arrived: policy and sampler compute log-probs of the same tokens with their models.

Fingerprints prove that the bytes arrived. This proves that they are where the model reads them.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from meshrl.data import Batch, Probe, Ragged, Source, Weights
from meshrl.errors import ModelError
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.scoring import Passes, PredictAll, logprobs

_ROWS: Final = 4
_TOKENS: Final = 16
_FEWEST: Final = 2
"""Fewest tokens of a row, because nothing predicts the first."""
TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-3, "bfloat16": 0.25, "fp8": 0.5}
"""Largest mean difference of policy and sampler, by the sampler's dtype, or the format of its matrices."""


def probe(passes: Passes, version: int) -> Probe | None:
    """Compute log-probs of tokens that depend only on the version. All ranks call it together.

    None if the model's longest row is too short to predict anything.
    """
    model = passes.model
    length = min(_TOKENS, model.max_tokens - 1)
    if length < _FEWEST:
        return None
    tokens = np.random.default_rng(version).integers(0, model.known, (_ROWS, length), np.int32)
    return Probe(tokens, _logprobs(passes, tokens))


def difference(model: LanguageModel, predict: PredictAll, asked: Probe) -> float:
    """Return the mean absolute difference of a model's log-probs from a probe."""
    return apart(asked, _logprobs(Passes(model, predict, asked.tokens.size), asked.tokens))


def apart(asked: Probe, logprobs: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
    """Return the mean absolute difference of log-probs."""
    return float(np.abs(asked.logprobs - logprobs).mean())


def check(weights: Weights, found: float, dtype: str) -> None:
    """Raise ModelError if a sampler with new weights computes something else than the policy that made them."""
    if weights.probe is not None and not np.isfinite(weights.probe.logprobs).all():
        raise ModelError(
            f"the weights of version {weights.version} give log-probs that are not finite in the policy itself: "
            "training has broken the model. Resume from a checkpoint, with a lower policy.optimizer.lr"
        )
    if not found <= TOLERANCE[dtype]:
        raise ModelError(
            f"the weights of version {weights.version} arrived, and yet the sampler's log-probs are {found:.3g} from "
            f"the policy's on average, on tokens given to both (at most {TOLERANCE[dtype]:g} in {dtype}): this "
            "model's weights do not reach all of the sampler's layers, and its completions cannot be trusted. Use "
            "another sampler.backend"
        )


def _logprobs(
    passes: Passes, tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    batch = Batch.of(tokens=Ragged.of(tokens, np.int32))
    values = logprobs(passes, batch, Source("sampler")).values
    return values.reshape(tokens.shape)[:, 1:].astype(np.float32)
