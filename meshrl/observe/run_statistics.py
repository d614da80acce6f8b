"""Numbers of runs: a curve with its ends and its noise, and the bootstrap of a difference (Efron 1979)."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

_PART: Final = 10
"""The first and the last tenth of a curve are its ends."""
_LEAST: Final = 5
"""Lowest number of points of an end."""
_RESAMPLES: Final = 4000
_NORMAL: Final = 1.959964
"""97.5 percent quantile of the normal distribution."""
_BLOCK: Final = 1 << 22
"""Resampled weights held in memory at once."""

Values = NDArray[np.float64]
Item = TypeVar("Item", int, str)


def finite(value: object) -> float | None:
    """A number that float64 can hold. None for others, such as infinity or 10 ** 400."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def digits(value: float) -> float:
    """Round to six digits."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class Curve:
    """A number over steps: int64[points] and float64[points], which are finite."""

    steps: NDArray[np.int64]
    values: Values

    @property
    def first(self) -> float:
        """Median of the first end."""
        return float(np.median(self.values[: self._end]))

    @property
    def last(self) -> float:
        """Median of the last end."""
        return float(np.median(self.values[-self._end :]))

    @property
    def scale(self) -> float:
        """Largest magnitude."""
        return float(np.abs(self.values).max())

    @property
    def chance(self) -> float:
        """The largest difference between means of two ends that noise alone explains.

        Four standard errors, because one of the two is the highest of many means. The noise is estimated from
        neighbours.
        """
        noise = float(np.sqrt(np.mean(np.diff(self.values) ** 2) / 2)) if len(self.values) > 1 else 0.0
        return 4 * noise * float(np.sqrt(2 / self._end))

    def smooth(self, part: int = _PART) -> Values:
        """float64[points]: for each point the mean of 1/`part` of the curve around it, at least five points."""
        kernel = np.ones(min(max(_LEAST, len(self.values) // part), len(self.values)))
        weights = np.convolve(np.ones(len(self.values)), kernel, "same")
        return np.convolve(self.values, kernel, "same") / weights

    def at(self, step: int) -> float:
        """The smoothed value at this step, or at the next step that has one."""
        return float(self.smooth()[min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)])

    @property
    def _end(self) -> int:
        return max(_LEAST, len(self.values) // _PART)


def curve_of(lines: Sequence[Mapping[str, object]], name: str) -> Curve | None:
    """The curve of a number in a file's lines. None if no line has the number."""
    every = ((_step(line), finite(line.get(name))) for line in lines)
    points = [(step, value) for step, value in every if step is not None and value is not None]
    if not points:
        return None
    return Curve(np.array([step for step, _ in points]), np.array([value for _, value in points], np.float64))


def steps_without(lines: Sequence[Mapping[str, object]], name: str) -> list[int]:
    """Steps whose number of this name is infinite or no number."""
    every = ((_step(line), line) for line in lines if name in line)
    return [step for step, line in every if step is not None and finite(line[name]) is None]


def _step(line: Mapping[str, object]) -> int | None:
    step = line.get("step")
    return step if isinstance(step, int) and abs(step) < 1 << 63 else None


@dataclass(frozen=True)
class ValuesOfRuns(Generic[Item]):
    """A number of a group's runs, for each item."""

    items: Sequence[Item] = ()
    """Prompts or steps."""
    values: Values = field(default_factory=lambda: np.zeros((0, 0)))
    """float64[runs, items]."""
    seeds: Sequence[str] = ()
    """Seed of each run."""

    def of(self, items: Sequence[Item]) -> "ValuesOfRuns[Item]":
        """Only these items, in this order."""
        places = {item: place for place, item in enumerate(self.items)}
        return ValuesOfRuns(items, self.values[:, [places[item] for item in items]], self.seeds)

    @property
    def by_seed(self) -> Values:
        """Mean over the runs of each seed, because they count as one: float64[seeds, items]."""
        rows = np.array(self.seeds)
        return np.stack([self.values[rows == seed].mean(0) for seed in dict.fromkeys(self.seeds)])


def bootstrap(base: Values, other: Values, seed: int, *, paired: bool) -> tuple[float, float, float]:
    """Return the mean of `other` minus that of `base`, and the ends of its 95 percent interval.

    The ends are percentiles, widened for few items: resampling n items underestimates the spread by the root of (n - 1)
    / n, and has the tails of a normal distribution instead of Student's t.

    `base`, `other`: float64[seeds, items]; items are prompts, for example. Seeds are drawn separately for each.
    Items are too, unless `paired`: then item i of both is the same prompt, and both use the same draws. This removes
    the difficulty of prompts from the difference. The seed determines every bit.
    """
    random = np.random.default_rng(seed)
    most = max(1, _BLOCK // max(base.shape[1], other.shape[1]))
    differences: list[Values] = []
    for done in range(0, _RESAMPLES, most):
        count = min(most, _RESAMPLES - done)
        items = _weights(random, base.shape[1], count)
        others = items if paired else _weights(random, other.shape[1], count)
        differences.append(_means(random, other, others) - _means(random, base, items))
    value = other.mean() - base.mean()
    spread = np.quantile(np.concatenate(differences), [0.025, 0.975]) - value
    low, high = value + _widening(min(base.shape[1], other.shape[1])) * spread
    return round(float(value), 12), round(float(low), 12), round(float(high), 12)


def _widening(items: int) -> float:
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


def _weights(random: np.random.Generator, items: int, count: int) -> Values:
    """Share of each item in each resample: float64[count, items]."""
    return random.multinomial(items, np.full(items, 1 / items), size=count) / items


def _means(random: np.random.Generator, values: Values, items: Values) -> Values:
    """Mean of each resample, float64[count]."""
    drawn: Values = _weights(random, len(values), len(items)) * (items @ values.T)
    means: Values = drawn.sum(axis=1)
    return means
