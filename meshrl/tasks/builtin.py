"""The shipped reward functions."""

import math
from collections.abc import Callable
from functools import cache
from typing import Final, SupportsFloat, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.tasks.sources import Row

_LARGEST: Final = float(np.finfo(np.float32).max)


def finite(value: object) -> float:
    """Return a user's reward as a float. TypeError or ValueError if it is not a finite number."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a reward must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be finite, not {number}")
    if abs(number) > _LARGEST:
        raise ValueError(f"a reward must be at most {_LARGEST:.4g} in size, since rewards are float32, not {number:g}")
    return number


def exact_match(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    """Return 1.0 if the completion equals the answer, except for surrounding white space, else 0.0."""
    answer = str(row["answer"]).strip()
    if not answer:
        raise ValueError("the row has no answer to compare with")
    return float(completion.strip() == answer)


def reasoning_gym(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    """Return the score of the row's reasoning_gym dataset for the completion, from 0 to 1."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError("the row does not come from reasoning_gym: it has no metadata.source_dataset")
    return _scorer(str(metadata["source_dataset"]))(completion.strip(), row)


def overlong_penalty(lengths: ArrayLike, max_tokens: int, margin: int) -> NDArray[np.float32]:
    """Compute DAPO's penalty for long completions: 0 up to `max_tokens - margin` tokens, falling to -1 at `max_tokens`.

    `lengths`, int[rows], are numbers of learned tokens. Returns float32[rows], to be added to rewards. With
    `margin = 0`, only completions beyond `max_tokens` are penalised. DAPO (arXiv:2503.14476), equation 13, where
    `margin` is L_cache.
    """
    over = np.asarray(lengths, np.float64) - (max_tokens - margin)
    if margin == 0:
        return np.where(over > 0, -1, 0).astype(np.float32)
    return -np.clip(over / margin, 0, 1).astype(np.float32)


@cache
def _scorer(dataset: str) -> Callable[[str, Row], float]:
    import reasoning_gym as package  # noqa: PLC0415 -- an extra, and slow to import

    return cast("Callable[[str, Row], float]", package.get_score_answer_fn(dataset))
