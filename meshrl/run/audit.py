"""Audit a run: check its guarantees by the files of its folder.

Four guarantees: each prompt is delivered to one step or dropped, versions never fall, no delivered row is older than
the bound, and steps follow each other. The files do not show what a script does with a batch. `groups.jsonl` records
what happened to the prompts. `metrics.jsonl` and `config.toml` are compared with it.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from meshrl.errors import DataError
from meshrl.run.audit_promises import MetricsLine, PromptAudit, StepAudit, Verdict, VersionAudit
from meshrl.tasks import Ranges, StepAccount

T = TypeVar("T")

_GROUPS: Final = "groups.jsonl"
_METRICS: Final = "metrics.jsonl"


@dataclass(frozen=True)
class Audit:
    """The result of an audit. Prompts are named by their numbers, `groups`."""

    folder: Path
    status: str
    """Status in summary.json, or `not ended` without that file."""
    steps: int
    resumed: int
    """Number of times that the run resumed from a checkpoint."""
    drawn: int
    """Number of prompts that the script or a stream took."""
    trained: int
    """Number of prompts that were delivered to a step, or that the script took in it."""
    dropped: Mapping[str, int]
    """Number of dropped prompts by reason: `filtered`, `stale`, or `closed` for those left when their stream ended."""
    under_way: int
    """Number of prompts that are still in progress when the files end."""
    held_back: int
    """Number of untrained prompts that the script took before its loop, or that its iterator left out."""
    missing: Ranges
    twice: Sequence[int]
    """Prompts that were delivered more than once, or both delivered and dropped."""
    staleness: int | None
    """Largest staleness. None if no stream delivered anything."""
    bound: int | None
    """Largest `ahead` of a stream."""
    verdicts: Sequence[Verdict]

    @property
    def holds(self) -> bool:
        """True if all guarantees hold."""
        return all(verdict.holds for verdict in self.verdicts)


class _Summary(msgspec.Struct, frozen=True):
    status: str


def audit_run(folder: Path) -> Audit:
    """Check a run's guarantees by its files.

    If a prompt in progress at a checkpoint is lost, the audit notices it because prompts come in the same order again:
    the resumed run takes a new prompt before the lost one. Raises DataError if the files cannot tell: without
    groups.jsonl, which older versions did not write, with invalid lines, or if no step has trained on a prompt.
    """
    summary = folder / "summary.json"
    status = _decoded(summary, summary.read_bytes(), _Summary).status if summary.is_file() else "not ended"
    if not (folder / _GROUPS).is_file():
        raise DataError(
            f"{folder} has no {_GROUPS}, so nothing says what its steps trained on: the run is of an earlier version, "
            "or the file was removed. Restore it, or run it again"
        )
    accounts = list(_lines(folder / _GROUPS, StepAccount, may_be_cut=status == "not ended"))
    metrics = list(_lines(folder / _METRICS, MetricsLine, may_be_cut=status == "not ended"))
    prompts, versions, steps = PromptAudit(), VersionAudit(_ahead(folder)), StepAudit()
    for account in accounts:
        where = steps.enter(account)
        for happening in account.happened:
            prompts.enter(happening, where)
            versions.enter(happening, where)
        prompts.close(account, where)
    steps.check_metrics(metrics)
    versions.check_metrics(metrics)
    prompts.end()
    if not steps.numbers or not prompts.trained:
        raise DataError(
            f"{folder / _GROUPS} has {len(steps.numbers)} steps and {len(prompts.trained)} prompts that were "
            "delivered to one, so there is nothing to judge: the run ended too early, or its script takes its prompts "
            "neither from `task.batches` in its loop nor from a stream of rollouts"
        )
    if steps.numbers[0] != 0:
        raise DataError(
            f"{folder / _GROUPS} begins with step {steps.numbers[0]}: earlier steps are of a version that wrote none, "
            "or were removed. Restore them, or run it again"
        )
    return Audit(
        folder,
        status,
        steps=len(steps.numbers),
        resumed=max(0, prompts.beginnings - 1),
        drawn=len(prompts.taken),
        trained=len(prompts.trained),
        dropped=Counter(prompts.dropped.values()),
        under_way=len(prompts.open),
        held_back=prompts.held_back,
        missing=prompts.missing_ranges,
        twice=sorted(prompts.twice),
        staleness=versions.largest,
        bound=versions.bound,
        verdicts=[prompts.verdict(), *versions.verdicts(), steps.verdict()],
    )


def steps_made(folder: Path) -> int:
    """Number of steps that a run has made, by its groups.jsonl. Raises DataError for invalid lines."""
    return sum(account.step is not None for account in _lines(folder / _GROUPS, StepAccount, may_be_cut=True))


def _lines(file: Path, kind: type[T], *, may_be_cut: bool) -> Iterator[T]:
    """Read the lines of a file. `may_be_cut`: a killed run may have left an incomplete last line."""
    whole, _, rest = file.read_bytes().rpartition(b"\n") if file.is_file() else (b"", b"", b"")
    lines = whole.split(b"\n") if whole else []
    if rest and not may_be_cut:
        lines.append(rest)
    for number, line in enumerate(lines, 1):
        yield _decoded(f"{file}, line {number}", line, kind)


def _decoded(where: object, content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # from msgspec and from UTF-8
        raise DataError(f"{where}: is not as a run wrote it: {error}. Restore the file, or run it again") from error


def _ahead(folder: Path) -> int | None:
    """The `ahead` of the configuration. None without one."""
    file = folder / "config.toml"
    try:
        ahead = tomllib.loads(file.read_text("utf-8")).get("ahead")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read, so the configuration is unknown: {error}") from error
    return ahead if isinstance(ahead, int) else None
