"""Audit a run: check its guarantees by the files of its folder.

Four guarantees: each prompt is delivered to one step or dropped, versions never fall, no delivered row is older than
the bound, and steps follow each other. The files do not show what a script does with a batch. `groups.jsonl` records
what happened to the prompts. `metrics.jsonl` and `config.toml` are compared with it.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from meshrl.errors import DataError
from meshrl.run.folder import GROUPS, METRICS, decoded, read_configuration, read_lines
from meshrl.tasks import APART, PromptEvent, Ranges, StepAccount, as_ranges, in_ranges

_REASONS: Final = {"stale": "too old"}
"""Reasons for dropping a prompt, as users read them."""


@dataclass(frozen=True)
class Verdict:
    """The result for one guarantee."""

    promise: str
    numbers: str
    """What was counted, as text."""
    breaches: Sequence[str]
    """Violations, one sentence each, with the step and the group."""

    @property
    def holds(self) -> bool:
        """True if there are no violations."""
        return not self.breaches


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    folder: Path
    status: str
    """Status in summary.json, or `not ended` without that file."""
    steps: int
    resumed: int
    """Number of times that the run resumed from a checkpoint."""
    prompts: "Prompts"
    versions: "Versions"
    verdicts: Sequence[Verdict]

    @property
    def holds(self) -> bool:
        """True if all guarantees hold."""
        return all(verdict.holds for verdict in self.verdicts)


class _Summary(msgspec.Struct, frozen=True):
    status: str


class _MetricsLine(msgspec.Struct, frozen=True):
    step: int
    staleness_max: float | None = None


def audit_run(folder: Path) -> Audit:
    """Check a run's guarantees by its files.

    If a prompt in progress at a checkpoint is lost, the audit notices it because prompts come in the same order again:
    the resumed run takes a new prompt before the lost one. Raises DataError if the files cannot tell: without
    groups.jsonl, which older versions did not write, with invalid lines, or if no step has trained on a prompt.
    """
    summary = folder / "summary.json"
    status = decoded(summary, summary.read_bytes(), _Summary).status if summary.is_file() else "not ended"
    if not (folder / GROUPS).is_file():
        raise DataError(
            f"{folder} has no {GROUPS}, so nothing says what its steps trained on: the run is of an earlier version, "
            "or the file was removed. Restore it, or run it again"
        )
    accounts = list(read_lines(folder / GROUPS, StepAccount, may_be_cut=status == "not ended"))
    metrics = list(read_lines(folder / METRICS, _MetricsLine, may_be_cut=status == "not ended"))
    prompts, versions, steps = Prompts(), Versions(_ahead(folder)), _Steps()
    for account in accounts:
        where = steps.enter(account)
        for event in account.happened:
            prompts.enter(event, where)
            versions.enter(event, where)
        prompts.close(account, where)
    verdicts = [prompts.end(), *versions.end(metrics), steps.end(metrics)]
    if not steps.numbers or not prompts.trained:
        raise DataError(
            f"{folder / GROUPS} has {len(steps.numbers)} steps and {len(prompts.trained)} prompts that were "
            "delivered to one, so there is nothing to judge: the run ended too early, or its script takes its prompts "
            "neither from `task.batches` in its loop nor from a stream of rollouts"
        )
    if steps.numbers[0] != 0:
        raise DataError(
            f"{folder / GROUPS} begins with step {steps.numbers[0]}: earlier steps are of a version that wrote none, "
            "or were removed. Restore them, or run it again"
        )
    return Audit(folder, status, len(steps.numbers), max(0, prompts.processes - 1), prompts, versions, verdicts)


def steps_made(folder: Path) -> int:
    """Number of steps that a run has made, by its groups.jsonl. Raises DataError for invalid lines."""
    return sum(account.step is not None for account in read_lines(folder / GROUPS, StepAccount, may_be_cut=True))


def _ahead(folder: Path) -> int | None:
    try:
        ahead = read_configuration(folder).get("ahead")
    except (OSError, ValueError) as error:
        file = folder / "config.toml"
        raise DataError(f"{file}: cannot be read, so the configuration is unknown: {error}") from error
    return ahead if isinstance(ahead, int) else None


@dataclass
class Prompts:
    """What happened to each prompt. Prompts are named by their numbers, `groups`."""

    taken: set[int] = field(default_factory=set)
    """Prompts that the script or a stream took."""
    held: set[int] = field(default_factory=set)
    """Prompts that the script took before its loop."""
    held_back: int = 0
    """Number of those that were not trained on, and of those that its iterator left out."""
    trained: dict[int, str] = field(default_factory=dict)
    """The step of each prompt that was delivered, or taken by the script in a step."""
    dropped: dict[int, str] = field(default_factory=dict)
    """The reason for each dropped prompt: `filtered`, `stale`, or `closed` if it was left when its stream ended."""
    open: set[int] = field(default_factory=set)
    """Prompts that streams have taken and neither delivered nor dropped."""
    again: set[int] = field(default_factory=set)
    """Prompts in progress at the checkpoint of the resumed run that have not been taken again."""
    missing: set[int] = field(default_factory=set)
    """Prompts that were drawn and then lost."""
    all_missing: Ranges = ()
    """These, and prompts that were dealt but never taken."""
    twice: set[int] = field(default_factory=set)
    """Prompts that were delivered more than once, or both delivered and dropped."""
    breaches: list[str] = field(default_factory=list)
    processes: int = 0
    """Number of processes of the run so far."""
    has_streams: bool = False
    dealt: dict[int, int] = field(default_factory=dict)
    """For each deal, the number after its last prompt."""

    def enter(self, event: PromptEvent, where: str) -> None:
        """Apply an event."""
        groups = list(in_ranges(event.groups))
        match event.what:
            case "begin":
                self.processes += 1
                self.again, self.open = self.again | self.open, set()
            case "open":
                self.has_streams = True
            case "hold":
                self.held.update(groups)
            case "draw":
                self._draw(groups, where)
            case "train":
                self.taken.update(groups)
                self._train(groups, where)
            case "deliver":
                self._close(groups, where, "delivered")
                self._train(groups, where)
            case "drop":
                self._close(groups, where, "dropped")
                self._drop(groups, where, event.why)
            case "publish":
                pass

    def close(self, account: StepAccount, where: str) -> None:
        """Compare the prompts in progress with those that the run reports."""
        reported = set(in_ranges(account.under_way))
        for group in sorted(self.open - reported):
            self.missing.add(group)
            self.breaches.append(f"{where}: group {group} was drawn, but is neither delivered, dropped nor in progress")
        for group in sorted(reported - self.open):
            had = f"delivered in {self.trained[group]}" if group in self.trained else "never drawn, or dropped"
            self.breaches.append(f"{where}: group {group} is recorded as in progress, but was {had}")
        self.open = reported
        self.dealt |= {deal: max(end, self.dealt.get(deal, 0)) for deal, end in enumerate(account.dealt)}

    def end(self) -> Verdict:
        """After the last account, find prompts that were dealt but never taken, and judge."""
        lost: list[tuple[int, int]] = []
        for deal, end in self.dealt.items():
            first = deal * APART
            known = sorted(group for group in self.taken | self.held | self.missing if first <= group < end)
            lost += [(one + 1, other) for one, other in pairwise([first - 1, *known, end]) if other > one + 1]
        # Untrained prompts that the script took before its loop, or that its iterator left out.
        self.held_back = len(self.held - self.taken)
        if self.has_streams:  # the script's own iterator is between the task and the stream
            self.held_back += sum(end - first for first, end in lost)
            lost = []
        for first, end in lost:
            named = f"group {first} was" if end == first + 1 else f"groups {first} to {end - 1} were"
            self.breaches.append(f"{named} drawn, but delivered to no step")
        self.all_missing = sorted([*as_ranges(self.missing), *lost])
        self.open |= self.again
        return Verdict("each prompt is delivered to one step or dropped", self._numbers(), self.breaches)

    def _numbers(self) -> str:
        dropped = Counter(self.dropped.values())
        left = dropped.pop("closed", 0)  # left when their stream ended
        reasons = ", ".join(f"{count:,} {_REASONS.get(why, why)}" for why, count in sorted(dropped.items()))
        missing = sum(end - first for first, end in self.all_missing)
        numbers = [
            f"{len(self.taken):,} drawn",
            f"{len(self.trained):,} delivered",
            f"{dropped.total():,} dropped" + (f" ({reasons})" if reasons else ""),
            *([f"{left:,} left over"] if left else []),
            *([f"{len(self.open):,} in progress"] if self.open else []),
            *([f"{self.held_back:,} held back by the script"] if self.held_back else []),
            f"{len(self.twice):,} twice, {missing:,} missing",
        ]
        return ", ".join(numbers)

    def _draw(self, groups: Sequence[int], where: str) -> None:
        self.again.difference_update(groups)
        fresh = {group // APART for group in groups if group not in self.taken}
        for group in sorted(group for group in self.again if group // APART in fresh):
            self.again.remove(group)
            self.missing.add(group)
            self.breaches.append(
                f"{where}: group {group} was in progress at the checkpoint of the resumed run, but is not drawn again "
                "before new ones"
            )
        self.taken.update(groups)
        self.open.update(groups)

    def _close(self, groups: Sequence[int], where: str, what: str) -> None:
        self.breaches += [
            f"{where}: group {group} is {what}, but was never drawn" for group in groups if group not in self.taken
        ]
        self.open.difference_update(groups)

    def _train(self, groups: Sequence[int], where: str) -> None:
        for group in groups:
            before = self.trained.get(group) or (f"dropped as {self.dropped[group]}" if group in self.dropped else "")
            if before:
                self.twice.add(group)
                self.breaches.append(f"{where}: group {group} is delivered again: {before}")
            self.trained[group] = where

    def _drop(self, groups: Sequence[int], where: str, why: str) -> None:
        for group in groups:
            if group in self.trained:
                self.twice.add(group)
                self.breaches.append(
                    f"{where}: group {group} is dropped as {why}, but was delivered: {self.trained[group]}"
                )
            self.dropped[group] = why


@dataclass
class _Stream:
    ahead: int
    published: list[int] = field(default_factory=list)
    """Versions published since it was opened that count for staleness."""


@dataclass
class Versions:
    """Published versions, and the staleness of delivered rows."""

    configured: int | None
    streams: dict[int | None, _Stream] = field(default_factory=dict)
    last: dict[int | None, int] = field(default_factory=dict)
    """Last version of each stream, across all processes of the run."""
    count: int = 0
    largest: int | None = None
    """Largest staleness. None if no stream delivered anything."""
    bound: int | None = None
    """Largest `ahead` of a stream."""
    falls: list[str] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)

    def enter(self, event: PromptEvent, where: str) -> None:
        """Apply an event."""
        if event.what == "begin":
            self.streams = {}
        elif event.what == "open":
            self.streams[event.stream] = _Stream(event.ahead)
            self.bound = max(event.ahead, self.bound or 0)
        elif event.what == "publish":
            self._publish(event, where)
        elif event.what == "deliver":
            self._deliver(event, where)

    def end(self, metrics: Sequence[_MetricsLine]) -> list[Verdict]:
        """Compare recorded staleness and the configured bound with the streams', and judge both guarantees."""
        bound = self.bound or 0
        self.too_old += [
            f"step {line.step}: metrics.jsonl has staleness_max = {line.staleness_max:g}, and ahead = {bound}"
            for line in metrics
            if line.staleness_max is not None and line.staleness_max > bound
        ]
        # Check the last process only: a resumed run may change `ahead`, and config.toml contains the last one's.
        self.too_old += [
            f"stream {number} was opened with ahead = {stream.ahead}, and config.toml has {self.configured}"
            for number, stream in self.streams.items()
            if self.configured is not None and stream.ahead > self.configured
        ]
        last = "".join(f", the last {version}" for version in self.last.values())
        published = f"{self.count:,} published to streams{last}" if self.count else "nothing was published to a stream"
        oldest = f"at most {self.largest}, ahead = {self.bound}"
        oldest = "no stream delivered anything" if self.largest is None else oldest
        return [
            Verdict("versions never fall", published, self.falls),
            Verdict("no delivered row is older than the bound", oldest, self.too_old),
        ]

    def _publish(self, event: PromptEvent, where: str) -> None:
        last = self.last.get(event.stream, event.version)
        if event.version < last:
            self.falls.append(f"{where}: version {event.version} is published after version {last}")
        self.last[event.stream] = event.version
        self.count += 1
        if event.stream not in self.streams:
            self.falls.append(
                f"{where}: version {event.version} is published to stream {event.stream}, which was never opened"
            )
        elif event.counts:
            self.streams[event.stream].published.append(event.version)

    def _deliver(self, event: PromptEvent, where: str) -> None:
        stream = self.streams.get(event.stream)
        if stream is None:
            self.too_old.append(f"{where}: stream {event.stream} delivers, but was never opened")
            return
        # Versions published after the oldest token and before the delivery. At most as many as the trainer knew of.
        age = len(stream.published) - bisect_right(stream.published, event.version)
        oldest = max(age, event.staleness)
        self.largest = max(oldest, self.largest or 0)
        if oldest > stream.ahead:
            groups = ", ".join(map(str, in_ranges(event.groups)))
            self.too_old.append(
                f"{where}: of groups {groups} the oldest token is {oldest} publications behind, and ahead = "
                f"{stream.ahead}"
            )
        elif age > event.staleness:
            self.too_old.append(
                f"{where}: a staleness of {event.staleness} is recorded, but by the versions published since "
                f"version {event.version} it is {age}"
            )


@dataclass
class _Steps:
    numbers: list[int] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    def enter(self, account: StepAccount) -> str:
        """Add the next account, and return its name."""
        if account.step is None:
            return f"after step {self.numbers[-1]}" if self.numbers else "before the first step"
        if self.numbers and account.step not in (self.numbers[-1] + 1, 0):
            self.breaches.append(f"step {account.step} comes after step {self.numbers[-1]} in groups.jsonl")
        self.numbers.append(account.step)
        return f"step {account.step}"

    def end(self, metrics: Sequence[_MetricsLine]) -> Verdict:
        """Check that the lines of metrics.jsonl are steps in order. A script need not record every step."""
        remaining = iter(self.numbers)
        before = "the beginning"
        for line in metrics:
            if line.step not in remaining:  # this consumes all steps up to the line's
                self.breaches.append(
                    f"step {line.step} comes after {before} in metrics.jsonl: no step is left for that place"
                )
                break
            before = f"step {line.step}"
        numbers = f"{len(self.numbers):,} steps, {len(metrics):,} of them recorded"
        return Verdict("steps follow each other", numbers, self.breaches)
