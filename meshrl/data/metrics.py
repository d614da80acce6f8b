"""Metrics: numbers that are averaged over tokens, rows and ranks, kept as sums and counts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Self

from meshrl.errors import DataError, did_you_mean


class Metrics:
    """Named means. Each is kept as a sum and a count. Immutable.

    A mean of means is wrong if ranks hold different numbers of tokens. Sums and counts add up correctly.

        Metrics.of(loss=(loss_sum, tokens), lr=lr)["loss"]
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, tuple[float, float]]) -> None:
        self._entries = {name: (float(total), float(count)) for name, (total, count) in entries.items()}

    @classmethod
    def of(cls, **entries: tuple[float, float] | float) -> Self:
        """Make metrics from `name=(sum, count)`. A number alone counts once."""
        return cls({name: value if isinstance(value, tuple) else (value, 1.0) for name, value in entries.items()})

    @classmethod
    def mean(cls, parts: Sequence[Self]) -> Self:
        """Average metrics: add the sums and the counts of each name. A part may lack a name."""
        entries: dict[str, tuple[float, float]] = {}
        for part in parts:
            for name, (total, count) in part.entries.items():
                before, seen = entries.get(name, (0.0, 0.0))
                entries[name] = (before + total, seen + count)
        return cls(entries)

    @property
    def entries(self) -> Mapping[str, tuple[float, float]]:
        """The sum and the count of each name."""
        return MappingProxyType(self._entries)

    def means(self) -> dict[str, float]:
        """Return the mean of each name, NaN if its count is 0."""
        return {name: self[name] for name in self._entries}

    def __getitem__(self, name: str) -> float:
        """Return the mean of a name, NaN if its count is 0. Raises DataError for an unknown name."""
        if name not in self._entries:
            hint = did_you_mean(name, self._entries, "`{}`") or f"it has {', '.join(self._entries) or 'no names'}"
            raise DataError(f"metrics have no `{name}`: {hint}")
        total, count = self._entries[name]
        return total / count if count else math.nan

    def __or__(self, other: "Metrics") -> "Metrics":
        """Merge metrics with different names. Raises DataError for a name in both: `Metrics.mean` averages these."""
        twice = sorted(self._entries.keys() & other.entries.keys())
        if twice:
            raise DataError(f"both metrics have `{'`, `'.join(twice)}`: rename one, or average them with Metrics.mean")
        return Metrics({**self._entries, **other.entries})

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return self.entries == other.entries if isinstance(other, Metrics) else NotImplemented

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value:.6g}' for name, value in self.means().items())})"
