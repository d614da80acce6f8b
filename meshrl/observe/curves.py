"""The numbers of a run as curves, with their first and last values."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PART: Final = 10
"""The first and the last tenth of a curve are its ends."""
_LEAST: Final = 5
"""Lowest number of points of an end."""


@dataclass(frozen=True)
class Curve:
    """A number over steps: int64[points] and float64[points], which are finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

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

    def smooth(self, part: int = _PART) -> NDArray[np.float64]:
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


class Curves:
    """The curves of a file's lines, by name."""

    def __init__(self, lines: Sequence[Mapping[str, object]]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._lines)

    def get(self, name: str) -> Curve | None:
        """A number's curve. None if no line has the number."""
        points = [
            (step, value)
            for line in self._lines
            if (step := _step(line)) is not None and (value := finite(line.get(name))) is not None
        ]
        if not points:
            return None
        return Curve(np.array([step for step, _ in points]), np.array([value for _, value in points], np.float64))

    def without_number(self, name: str) -> list[int]:
        """Steps whose number is infinite or no number."""
        return [
            step
            for line in self._lines
            if (step := _step(line)) is not None and name in line and finite(line[name]) is None
        ]


def finite(value: object) -> float | None:
    """A number that float64 can hold. None for others, such as infinity or 10 ** 400."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _step(line: Mapping[str, object]) -> int | None:
    step = line.get("step")
    return step if isinstance(step, int) and abs(step) < 1 << 63 else None
