"""Whether groups of runs differ by more than chance: prompts, steps and runs are resampled (Efron 1979)."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_RESAMPLES: Final = 4000
_BLOCK: Final = 1 << 22
"""Numbers of resampled weights at a time."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """A measure of a group, less that of the first group, with the 95 percent interval."""

    measure: str
    base: str
    """The name of the first group."""
    other: str
    values: tuple[float, float]
    """Of the first group and of the other."""
    value: float
    low: float
    high: float
    over: str
    """What was resampled, such as `512 prompts`."""
    runs: tuple[int, int]
    """Of each group."""

    @property
    def is_seen(self) -> bool:
        """Whether chance explains less."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        first, second = self.values
        if self.low == self.high:
            return f"{self.measure}: the same in {self.other} and in {self.base}, {first:.3g}"
        seen, seeds = self.is_seen, "other seeds are not in it"
        chance = f"more than chance over {self.over} explains" if seen else f"chance over {self.over} explains as much"
        if min(self.runs) > 1:
            seeds = f"{self.runs[0]} and {self.runs[1]} seeds are in it"
        way = "higher" if self.value > 0 else "lower"
        return (
            f"{self.measure}: {abs(self.value):.3g} {way} in {self.other} than in {self.base} "
            f"({second:.3g} and {first:.3g}; 95% from {self.low:+.3g} to {self.high:+.3g}); {chance}, {seeds}"
        )


def resampled(base: Values, other: Values, seed: int, *, paired: bool) -> tuple[float, float, float]:
    """The mean of `other` less that of `base`, and the ends of its 95 percent interval (percentiles).

    `base`, `other`: float64[runs, items], items such as prompts. Runs are drawn anew for each of the two, and items
    too: the same of both where they are `paired`, item i of one being item i of the other, which takes what makes a
    prompt hard out of the difference. The seed decides every bit.
    """
    random = np.random.default_rng(seed)
    found: list[Values] = []
    for count in _counts(max(base.shape[1], other.shape[1])):
        items = _weights(random, base.shape[1], count)
        others = items if paired else _weights(random, other.shape[1], count)
        found.append(_means(random, other, others) - _means(random, base, items))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    value, low, high = (round(float(each), 12) for each in (other.mean() - base.mean(), low, high))
    return value, low, high


def _counts(items: int) -> list[int]:
    """Resamples, so many at a time that they need little memory."""
    most = max(1, _BLOCK // items)
    return [min(most, _RESAMPLES - done) for done in range(0, _RESAMPLES, most)]


def _weights(random: np.random.Generator, items: int, count: int) -> Values:
    """How often each item is drawn, as shares: float64[count, items]."""
    return random.multinomial(items, np.full(items, 1 / items), size=count) / items


def _means(random: np.random.Generator, values: Values, items: Values) -> Values:
    """The mean in each resample, float64[count]."""
    runs = _weights(random, len(values), len(items))
    drawn: Values = runs * (items @ values.T)
    total: Values = drawn.sum(axis=1)
    return total
