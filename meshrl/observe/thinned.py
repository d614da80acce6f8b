"""Any number of steps in bounded memory: beyond a limit, each point is the mean of neighbours."""

import sys

from meshrl.observe.reading import Line

POINTS = 1000
"""Points at most, an even number. With one more, pairs of points are joined."""
NAMES = 256
"""Numbers of a step at most. Others are left out."""


class Thinned:
    """Lines of metrics.jsonl, as they come."""

    def __init__(self) -> None:
        self.count: int = 0
        """Number of lines so far."""
        self._names: set[str] = set()
        self._points: list[_Point] = []
        self._each = 1
        """Lines per point."""

    def add(self, line: Line) -> None:
        """Add a step."""
        if not self._points or self._points[-1].lines == self._each:
            if len(self._points) == POINTS:
                self._points = [_joined(*pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)]
                self._each *= 2
            self._points.append(_Point(line.get("step")))
        point = self._points[-1]
        point.lines += 1
        self.count += 1
        for name, value in line.items():
            if name == "step" or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                continue
            if name not in self._names and len(self._names) < NAMES:
                self._names.add(name)
            if name in self._names:
                point.add(name, float(value), 1)

    @property
    def lines(self) -> list[Line]:
        """At most POINTS lines in the form of metrics.jsonl, and the original lines if there were no more."""
        return [
            {"step": point.step, **{name: total / count for name, (total, count) in point.sums.items()}}
            for point in self._points
        ]


class _Point:
    def __init__(self, step: object) -> None:
        self.step = step
        """Step of the first of its lines."""
        self.lines = 0
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, total: float, count: int) -> None:
        before, so_far = self.sums.get(name, (0.0, 0))
        self.sums[name] = before + total, so_far + count


def _joined(one: _Point, other: _Point) -> _Point:
    for name, (total, count) in other.sums.items():
        one.add(name, total, count)
    one.lines += other.lines
    return one
