"""Estimates from samples of completions: pass@k, and confidence intervals."""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.errors import DataError

_Z: Final = 1.959963984540054
"""The 97.5 percent quantile of a standard normal distribution: 95 percent are within plus and minus this."""
_RESAMPLES: Final = 2000


class Estimate(msgspec.Struct, frozen=True):
    """A measured number and its 95 percent confidence interval."""

    value: float
    low: float
    high: float


def powers_of_2(n: int) -> list[int]:
    """Return the powers of 2 up to n, and n: the k of pass@k."""
    return sorted({*(1 << power for power in range(n.bit_length())), n})


def pass_at_k(correct: ArrayLike, n: int, k: int) -> NDArray[np.float64]:
    """Estimate the chance that one of k completions of a prompt is right, float64[prompts].

    `correct`: int[prompts], the number of right completions among the n of each prompt. This is the unbiased estimator
    `1 - C(n - c, k) / C(n, k)` of Chen et al. 2021 (arXiv:2107.03374), equation 1, as a product without large numbers.
    DataError unless 1 <= k <= n and each count is from 0 to n.
    """
    counts = np.asarray(correct, np.int64)
    if not 1 <= k <= n:
        raise DataError(f"pass@{k} of {n} completions for each prompt: k must be from 1 to {n}; draw more, or lower k")
    if counts.size and (counts.min() < 0 or counts.max() > n):
        raise DataError(f"pass@{k}: counts from {counts.min()} to {counts.max()} of {n} completions: from 0 to {n}")
    number = np.arange(1, n + 1, dtype=np.float64)
    factors = np.maximum(1.0 - k / number, 0.0)
    # The chance that none is right is the product of 1 - k / i over i from n - c + 1 to n.
    tails = np.concatenate([[1.0], np.cumprod(factors[::-1])])
    return 1.0 - tails[counts]


def wilson(right: int, of: int) -> Estimate:
    """Estimate a share of independent trials, with Wilson's interval (1927): good for few trials and near 0 and 1.

    Raises DataError if there are no trials.
    """
    if of < 1:
        raise DataError(f"the share of {right} in {of} trials: there must be at least one trial")
    share, spread = right / of, _Z**2 / of
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * float(np.sqrt(share * (1 - share) / of + spread / (4 * of))) / (1 + spread)
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def bootstrap(values: ArrayLike, seed: int) -> Estimate:
    """Estimate the mean of one value for each prompt. The interval resamples prompts (Efron 1979, percentiles).

    `values`: float[prompts]. The uncertainty is that of the choice of prompts. Completions of a prompt are not
    resampled. The seed determines every bit. DataError if there are no prompts.
    """
    given = np.asarray(values, np.float64)
    if not given.size:
        raise DataError("bootstrap: no prompt was measured: give at least one value")
    random = np.random.default_rng(seed)
    means = [given[random.integers(len(given), size=len(given))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(given.mean()), float(low), float(high))
