"""The durations of calls in a recorded run, where they ran, and their estimates for other places."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self, cast

import numpy as np

from meshrl.config import Table
from meshrl.errors import DataError
from meshrl.events import CORES_OF, Gauge
from meshrl.observe import read_events
from meshrl.planning.pace import ROLES, CallCost, Endpoint, Pace, step_windows, typical_cost

WARM_UP: Final = 2
"""Steps, in addition to `ahead`, that fill the pipeline."""


@dataclass(frozen=True)
class Place:
    """Where a role's calls run: on ranks of one shape."""

    split: int = 1
    """Number of ranks that share the same rows, along all axes except dp."""
    cpus: int | None = None
    """Cores per rank. None if unknown, or if the rank computes on a GPU."""
    is_known: bool = False
    """True if `cpus` is known and not assumed."""
    gpus: bool = False
    """True if the rank computes on a GPU."""
    stages: int = 1
    """Pipeline stages: ranks along pp."""
    passes: int = 1
    """Approximate number of micro-batches of an update on a rank, which keep pipeline stages busy."""

    @property
    def bubble(self) -> float:
        """Factor by which an update takes longer because the pipeline fills and drains."""
        return 1 + (self.stages - 1) / self.passes


def places_of(
    table: Table, cores: int | None = None, recorded: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Place]:
    """The place of each role of a configuration's tables, by the role's name.

    `cores`: cores of the machine, which a single mesh without `cpus` is assumed to use. `recorded`: cores per rank of
    meshes, as they were in a run.
    """
    meshes = _table(_table(table, "run"), "meshes")
    tables = {role: _table(table, role.lower()) for role in ROLES}
    named = {str(own.get("mesh", "main")) for own in tables.values()}
    places: dict[str, Place] = {}
    for role, own in tables.items():
        name = str(own.get("mesh", "main"))
        mesh = _table(meshes, name)
        ranks, gpus = _number(mesh, "ranks", 1), bool(mesh.get("gpus"))
        cpus = None if gpus else recorded.get(name, mesh.get("cpus"))
        is_known = isinstance(cpus, int)
        if not is_known and not gpus and len(named) == 1:
            cpus = cores and max(1, cores // ranks)
        axes = _table(own, "axes") or _table(mesh, "axes")
        split = prod(size for axis, size in axes.items() if axis != "dp" and isinstance(size, int))
        passes = _passes(table, own, max(1, ranks // split))
        cpus = cpus if isinstance(cpus, int) else None
        places[role] = Place(split, cpus, is_known, gpus, _number(axes, "pp", 1), passes)
    return places


def _passes(table: Table, own: Table, shares: int) -> int:
    """Micro-batches of an update on a rank, if all completions have the maximal length."""
    sampling = _table(table, "sampling")
    rows = _number(table, "prompts", 1) * _number(sampling, "n", 1) / _number(table, "minibatches", 1)
    tokens = rows * _number(sampling, "max_tokens", 1) / shares
    return max(1, math.ceil(tokens / _number(own, "micro_batch_tokens", 1 << 62)))


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run."""

    folder: Path
    table: Table
    """Its configuration."""
    pace: Pace
    measured: float
    """Its median step in seconds."""
    cores: Mapping[str, int] = field(default_factory=dict[str, int])
    """Cores per rank of its meshes."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder. Raises DataError if it has too few steps or no events."""
        notes: list[str] = []
        events = read_events(folder / "events.jsonl", notes)
        if not events:
            raise DataError(f"{folder}: nothing to simulate from: {' '.join(notes) or 'events.jsonl is empty.'}")
        config = folder / "config.toml"
        if not config.is_file():
            raise DataError(f"{folder}: there is no config.toml, which has the number of completions of a prompt")
        table: Table = tomllib.loads(config.read_text("utf-8"))
        first = _number(table, "ahead", 0) + WARM_UP
        windows = step_windows(events, first)
        splits = {role: place.split for role, place in places_of(table).items()}
        pace = Pace.recorded(events, _number(_table(table, "sampling"), "n", 1), first, splits)
        gauges = [each for each in events if isinstance(each, Gauge) and each.name.startswith(CORES_OF)]
        cores = {each.name.removeprefix(CORES_OF): int(each.value) for each in gauges}
        return cls(folder, table, pace, float(np.median(windows[:, 1] - windows[:, 0])), cores)

    @classmethod
    def guessed(cls, rollout: float, train: float, rows: int | None) -> Self:
        """A guess in place of a record, for one rank on any device: seconds of `generate` and `update` for the rows."""
        pace = Pace(
            {("Sampler", "generate"): [CallCost([rollout], rows)], ("Policy", "update"): [CallCost([train], rows)]}
        )
        return cls(Path(), {"run": {"meshes": {"main": {"gpus": 1}}}}, pace, 0.0)


@dataclass(frozen=True)
class Assumptions:
    """Assumptions for what no record shows."""

    cores: float = 0.4
    """On n cores a call runs n to this power times as fast as on one. Small models gain little from threads."""
    split: float = 0.9
    """Efficiency of each doubling of the ranks that share the same rows, along tp, pp or cp."""


GUESSES: Final = Assumptions()
_ENDS: Final = [Assumptions(cores, split) for cores in (0.0, 0.8) for split in (0.75, 1.0)]
"""Extremes of the assumptions."""
_ROWS: Final = (-0.5, 0.1)
"""Extremes of the exponent of a call's time off its line, for rows beyond the recorded ones. Calls with few rows have
been up to 1.4 times as long with half of the rows (docs/benchmarks.md, Planned and measured steps)."""


def fit(records: Sequence[RecordedRun], table: Table, cores: int | None = None, guesses: Assumptions = GUESSES) -> Pace:
    """Estimate the costs of calls in a configuration: for each role, from the most similar record.

    That is the record with the nearest number of cores per rank and of ranks that share rows, or the first of equal
    ones. On n cores a call runs at n ** e times its speed on one core. The exponent e comes from records of the
    endpoint with different cores. `table`: the configuration with its defaults. `cores`: of the machine, as in
    `places_of`.
    """
    wanted_places = places_of(table, cores)
    places = [places_of(record.table, cores, record.cores) for record in records]
    works: dict[Endpoint, Sequence[CallCost]] = {}
    notes: list[str] = []
    chosen = {role: _nearest([each[role] for each in places], wanted) for role, wanted in wanted_places.items()}
    for role, wanted in wanted_places.items():
        had, pace = places[chosen[role]][role], records[chosen[role]].pace
        keys = [key for key in pace.works if key[0] == role]
        if keys and pace.strict and (unlike := _assumption_of_hardware(had, wanted)):
            notes.append(f"{role}: {unlike}")
        if keys and had.split != wanted.split:
            notes.append(f"{role}: {wanted.split} ranks to the same rows, of each doubling {guesses.split:.0%}")
        for key in keys:
            factor = _gain(had.split, guesses.split) / _gain(wanted.split, guesses.split)
            factor *= wanted.bubble / had.bubble if key[1] in ("update", "forward_backward") else 1.0
            if had.cpus and wanted.cpus and had.cpus != wanted.cpus:
                learned = _exponent(
                    [(each[role].cpus, of.pace.works.get(key, ())) for each, of in zip(places, records, strict=True)]
                )
                exponent = guesses.cores if learned is None else learned
                factor *= (had.cpus / wanted.cpus) ** exponent
                if learned is None:
                    notes.append(f"{role}: cores ** {exponent:.2g}, from ranks of {had.cpus} to ranks of {wanted.cpus}")
            works[key] = [replace(work, seconds=[each * factor for each in work.seconds]) for work in pace.works[key]]
    return replace(records[chosen["Policy"]].pace, works=works, guessed=list(dict.fromkeys(notes)))


def fit_ends(records: Sequence[RecordedRun], table: Table, cores: int | None = None) -> tuple[Pace, Pace]:
    """The costs of calls if all are as slow as the assumptions allow, and if all are as fast.

    Chosen for each endpoint separately, because a role with fewer cores and one with more are slow by different
    guesses.
    """
    paces = [fit(records, table, cores, guesses) for guesses in _ENDS]

    def total(works: Sequence[CallCost]) -> float:
        return sum(sum(work.seconds) for work in works)

    slow, fast = (
        replace(
            paces[0],
            works={key: choose((pace.works[key] for pace in paces), key=total) for key in paces[0].works},
            beyond=(choose(_ROWS, key=lambda of: -of), choose(_ROWS)) if paces[0].strict else paces[0].beyond,
        )
        for choose in (max, min)
    )
    return slow, fast


def _assumption_of_hardware(had: Place, wanted: Place) -> str:
    """The assumption that a recorded rank computes like the wanted one, if nothing says so. Or nothing."""
    if had.gpus != wanted.gpus and 0 not in (had.cpus, wanted.cpus):  # a function may have no core
        kinds = "CPU", "GPU"
        return f"a rank on a {kinds[wanted.gpus]} as fast as the recorded one on a {kinds[had.gpus]}"
    if wanted.cpus and not had.is_known and not had.gpus:
        return f"recorded on ranks of unknown cores, taken as {had.cpus or wanted.cpus}"
    return ""


def _nearest(places: Sequence[Place], wanted: Place) -> int:
    def apart(place: Place) -> tuple[bool, float, float]:
        cores = math.log(place.cpus / wanted.cpus) if place.cpus and wanted.cpus else 0.0
        return place.gpus != wanted.gpus, abs(cores), abs(math.log(place.split / wanted.split))

    return min(range(len(places)), key=lambda at: apart(places[at]))


def _gain(split: int, each: float) -> float:
    """The speed-up of `split` ranks that share the same rows over one rank."""
    return float(split * each ** math.log2(split))


def _exponent(measured: Sequence[tuple[int | None, Sequence[CallCost]]]) -> float | None:
    """The exponent with which a call's speed grows with cores, from the records with the fewest and most. Or None.

    Both are compared at the rows of the one with the fewest.
    """
    of = {cpus: works for cpus, works in measured if cpus and works}
    if len(of) < 2:
        return None
    few, many = min(of), max(of)
    rows = float(np.median([work.rows or 0.0 for work in of[few]]))
    slow, fast = typical_cost(of[few], rows, of[many]), typical_cost(of[many], rows, of[few])
    if not slow or not fast:
        return None
    return min(1.0, max(0.0, math.log(slow / fast) / math.log(many / few)))


def _number(table: Table, name: str, default: int) -> int:
    """An integer of a table."""
    value = table.get(name, default)
    return value if isinstance(value, int) else default


def _table(table: Table, name: str) -> Table:
    inner = table.get(name)
    return cast("Table", inner) if isinstance(inner, dict) else {}
