"""The numbers of a run as curves, with their first and last values."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PART: Final = 10
"""The first and the last so many-th of a curve are its ends."""
_LEAST: Final = 5
"""Points of an end, at least."""


@dataclass(frozen=True)
class Curve:
    """A number over steps: int64[points] and float64[points], which are finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def first(self) -> float:
        """The median of its beginning."""
        return float(np.median(self.values[: self._end]))

    @property
    def last(self) -> float:
        """The median of its end."""
        return float(np.median(self.values[-self._end :]))

    @property
    def scale(self) -> float:
        """The largest magnitude."""
        return float(np.abs(self.values).max())

    @property
    def chance(self) -> float:
        """How far apart two means of as many points as an end has may be where nothing but noise is between them.

        Four standard errors, since the highest of many means is one of the two; the noise is that between neighbours.
        """
        noise = float(np.sqrt(np.mean(np.diff(self.values) ** 2) / 2)) if len(self.values) > 1 else 0.0
        return 4 * noise * float(np.sqrt(2 / self._end))

    def smooth(self, part: int = _PART) -> NDArray[np.float64]:
        """float64[points]: each point as the mean of so-many-th of the curve around it, five points at least."""
        kernel = np.ones(min(max(_LEAST, len(self.values) // part), len(self.values)))
        weights = np.convolve(np.ones(len(self.values)), kernel, "same")
        return np.convolve(self.values, kernel, "same") / weights

    def at(self, step: int) -> float:
        """The smooth value where this step is, or the next one that has any."""
        return float(self.smooth()[min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)])

    @property
    def _end(self) -> int:
        return max(_LEAST, len(self.values) // _PART)


class Curves:
    """Of the lines of a file, by name."""

    def __init__(self, lines: Sequence[Mapping[str, object]]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        """Lines."""
        return len(self._lines)

    def get(self, name: str) -> Curve | None:
        """A number's curve; None where no line has it."""
        points = [
            (step, value)
            for line in self._lines
            if (step := _step(line)) is not None and (value := finite(line.get(name))) is not None
        ]
        if not points:
            return None
        return Curve(np.array([step for step, _ in points]), np.array([value for _, value in points], np.float64))

    def without_number(self, name: str) -> list[int]:
        """The steps whose number is infinite or none."""
        return [
            step
            for line in self._lines
            if (step := _step(line)) is not None and name in line and finite(line[name]) is None
        ]


def finite(value: object) -> float | None:
    """A number that a float64 holds; None for anything else, such as an infinite one or 10 ** 400."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _step(line: Mapping[str, object]) -> int | None:
    step = line.get("step")
    return step if isinstance(step, int) and abs(step) < 1 << 63 else None
