"""The meaning, unit and colour of each number of a run."""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, cast

Hue: TypeAlias = Literal["rollout", "training", "scoring", "sync", "plain"]
"""A part of the run, each with its own colour in the report. `plain` is for all other numbers."""


class MetricInfo(NamedTuple):
    """A number's unit, colour and meaning."""

    unit: str = ""
    """Empty if it has no unit or the unit is unknown."""
    hue: Hue = "plain"
    meaning: str = ""
    """A sentence or two, for the reference."""


FRONT: Final = (
    *("reward", "eval/reward", "eval/greedy", "completion_tokens", "reference_kl", "kl", "entropy"),
    *("loss", "clip_fraction", "staleness"),
)
"""The curves at the top of the report, in this order: first those that show learning, then those of updates."""

_FILE: Final = Path(__file__).with_name("metrics.toml")


@cache
def metrics() -> Mapping[str, MetricInfo]:
    """The numbers by name, in which `*` matches any text."""
    tables = cast("Mapping[Hue, Mapping[str, tuple[str, str]]]", tomllib.loads(_FILE.read_text("utf-8")))
    return {
        name: MetricInfo(unit, hue, meaning) for hue, own in tables.items() for name, (unit, meaning) in own.items()
    }


def metric_info(name: str) -> MetricInfo:
    """Return the unit, colour and meaning of a metric, a gauge or a number of the summary.

    Without an entry of its name, the first pattern that matches counts.
    """
    if name in metrics():
        return metrics()[name]
    return next((known for pattern, known in metrics().items() if fnmatchcase(name, pattern)), MetricInfo())
