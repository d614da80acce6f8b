"""Test whether groups of runs differ by more than chance, by resampling prompts, steps and runs (Efron 1979)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

_RESAMPLES: Final = 4000
_NORMAL: Final = 1.959964
"""97.5 percent quantile of the normal distribution."""
_BLOCK: Final = 1 << 22
"""Resampled weights held in memory at once."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class ValuesOfRuns:
    """A number of a group's runs, for each item."""

    values: Values = field(default_factory=lambda: np.zeros((0, 0)))
    """float64[runs, items]; items are prompts or steps."""
    seeds: Sequence[str] = ()
    """Seed of each run."""

    @property
    def by_seed(self) -> Values:
        """Mean over the runs of each seed, because they count as one: float64[seeds, items]."""
        rows = np.array(self.seeds)
        return np.stack([self.values[rows == seed].mean(0) for seed in dict.fromkeys(self.seeds)])


@dataclass(frozen=True)
class Difference:
    """A group's measure minus that of the first group, with the 95 percent interval."""

    measure: str
    base: str
    """The name of the first group."""
    other: str
    values: tuple[float, float]
    """Value of the first group, then of the other."""
    value: float
    low: float
    high: float
    over: str
    """What was resampled, such as `512 prompts`."""
    seeds: tuple[int, int]
    """Number of different seeds that were compared in each group."""

    @property
    def is_seen(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """The result as text."""
        first, second = self.values
        if self.value == self.low == self.high == 0:
            return f"{self.measure}: the same in {self.other} and in {self.base}, {first:.3g}"
        seeds = "variation between seeds is not included"
        if min(self.seeds) > 1:
            seeds = f"{self.seeds[0]} and {self.seeds[1]} seeds are in it"
        way = "higher" if self.value > 0 else "lower"
        found = f"{self.measure}: {abs(self.value):.3g} {way} in {self.other} than in {self.base}"
        if self.low == self.high:
            return (
                f"{found} ({second:.3g} and {first:.3g}), the same for each of {self.over}: nothing varies, so there "
                f"is no interval; {seeds}"
            )
        explains = "more than chance over {} explains" if self.is_seen else "chance over {} explains as much"
        return (
            f"{found} ({second:.3g} and {first:.3g}; 95% from {self.low:+.3g} to {self.high:+.3g}); "
            f"{explains.format(self.over)}, {seeds}"
        )


def resampled(base: Values, other: Values, seed: int, *, paired: bool) -> tuple[float, float, float]:
    """Return the mean of `other` minus that of `base`, and the ends of its 95 percent interval.

    The ends are percentiles, widened for few items: resampling n items underestimates the spread by the root of (n - 1)
    / n, and has the tails of a normal distribution instead of Student's t.

    `base`, `other`: float64[seeds, items]; items are prompts, for example. Seeds are drawn separately for each.
    Items are too, unless `paired`: then item i of both is the same prompt, and both use the same draws. This removes
    the difficulty of prompts from the difference. The seed determines every bit.
    """
    random = np.random.default_rng(seed)
    found: list[Values] = []
    for count in _counts(max(base.shape[1], other.shape[1])):
        items = _weights(random, base.shape[1], count)
        others = items if paired else _weights(random, other.shape[1], count)
        found.append(_means(random, other, others) - _means(random, base, items))
    value = other.mean() - base.mean()
    ends = value + _widened(min(base.shape[1], other.shape[1])) * (
        np.quantile(np.concatenate(found), [0.025, 0.975]) - value
    )
    value, low, high = (round(float(each), 12) for each in (value, *ends))
    return value, low, high


def _widened(items: int) -> float:
    """The factor by which an interval of `items` items, at least two, is wider than its percentiles.

    Student's quantile is computed from the normal one, by its series in 1 / (items - 1) (Abramowitz and Stegun,
    26.7.5).
    """
    z, v = _NORMAL, items - 1
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    student = z + sum(term / v**power for power, term in enumerate(terms, start=1))
    return float(student / z * np.sqrt(items / v))


def _counts(items: int) -> list[int]:
    """Numbers of resamples per block, small enough to need little memory."""
    most = max(1, _BLOCK // items)
    return [min(most, _RESAMPLES - done) for done in range(0, _RESAMPLES, most)]


def _weights(random: np.random.Generator, items: int, count: int) -> Values:
    """Share of each item in each resample: float64[count, items]."""
    return random.multinomial(items, np.full(items, 1 / items), size=count) / items


def _means(random: np.random.Generator, values: Values, items: Values) -> Values:
    """Mean of each resample, float64[count]."""
    runs = _weights(random, len(values), len(items))
    drawn: Values = runs * (items @ values.T)
    total: Values = drawn.sum(axis=1)
    return total
