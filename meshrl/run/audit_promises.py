"""The guarantees that an audit checks, one after the other, step by step."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import msgspec

from meshrl.tasks import APART, Happening, Ranges, StepAccount, as_ranges, in_ranges

_WHY: Final = {"stale": "too old"}
"""Reasons as users read them."""


@dataclass(frozen=True)
class Verdict:
    """The result for one guarantee."""

    promise: str
    told: str
    """Its numbers as text."""
    breaches: Sequence[str]
    """Violations, one sentence each, with the step and the group."""

    @property
    def holds(self) -> bool:
        """True if there are no violations."""
        return not self.breaches


class MetricsLine(msgspec.Struct, frozen=True):
    """The fields of a line of metrics.jsonl that an audit reads."""

    step: int
    staleness_max: float | None = None


@dataclass
class PromptAudit:
    """What happened to each prompt."""

    taken: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    """Prompts that the script took before its loop."""
    trained: dict[int, str] = field(default_factory=dict)
    """The step of each prompt that was delivered, or taken by the script in a step."""
    dropped: dict[int, str] = field(default_factory=dict)
    """The reason for each dropped prompt."""
    open: set[int] = field(default_factory=set)
    """Prompts that streams have taken and neither delivered nor dropped."""
    again: set[int] = field(default_factory=set)
    """Prompts in progress at the checkpoint of the resumed run that have not been taken again."""
    missing: set[int] = field(default_factory=set)
    lost: Ranges = ()
    """Prompts that were dealt but never taken."""
    twice: set[int] = field(default_factory=set)
    breaches: list[str] = field(default_factory=list)
    beginnings: int = 0
    held_back: int = 0
    streams: bool = False
    dealt: dict[int, int] = field(default_factory=dict)
    """For each deal, the number after its last prompt."""

    def enter(self, happening: Happening, where: str) -> None:
        """Apply an event."""
        groups = list(in_ranges(happening.groups))
        match happening.what:
            case "begin":
                self.beginnings += 1
                self.again, self.open = self.again | self.open, set()
            case "open":
                self.streams = True
            case "hold":
                self.held.update(groups)
            case "draw":
                self._draw(groups, where)
            case "train":
                self.taken.update(groups)
                self._train(groups, where)
            case "deliver":
                self._settle(groups, where, "delivered")
                self._train(groups, where)
            case "drop":
                self._settle(groups, where, "dropped")
                self._drop(groups, where, happening.why)
            case "publish":
                pass

    def close(self, account: StepAccount, where: str) -> None:
        """Compare the prompts in progress with those that the run reports."""
        said = set(in_ranges(account.under_way))
        for group in sorted(self.open - said):
            self.missing.add(group)
            self.breaches.append(f"{where}: group {group} was drawn, but is neither delivered, dropped nor in progress")
        for group in sorted(said - self.open):
            had = f"delivered in {self.trained[group]}" if group in self.trained else "never drawn, or dropped"
            self.breaches.append(f"{where}: group {group} is recorded as in progress, but was {had}")
        self.open = said
        self.dealt |= {deal: max(end, self.dealt.get(deal, 0)) for deal, end in enumerate(account.dealt)}

    def end(self) -> None:
        """After the last account, find prompts that were dealt but never taken."""
        lost = [gap for deal, end in self.dealt.items() for gap in self._gaps(deal * APART, end)]
        self.held_back = len(self.held - self.taken)
        if self.streams:  # the script's own iterator is between the task and the stream
            self.held_back += sum(end - first for first, end in lost)
        else:
            self.lost = lost
            self.breaches += [f"{_named(first, end)} drawn, but delivered to no step" for first, end in lost]
        self.open |= self.again

    @property
    def missing_ranges(self) -> Ranges:
        """All missing prompts."""
        return sorted([*as_ranges(self.missing), *self.lost])

    def verdict(self) -> Verdict:
        """The result of this check."""
        dropped = Counter(self.dropped.values())
        left = dropped.pop("closed", 0)  # left when their stream ended
        why = ", ".join(f"{count:,} {_WHY.get(why, why)}" for why, count in sorted(dropped.items()))
        told = [f"{len(self.taken):,} drawn", f"{len(self.trained):,} delivered"]
        told += [f"{dropped.total():,} dropped" + (f" ({why})" if why else "")]
        told += [f"{left:,} left over"] if left else []
        told += [f"{len(self.open):,} in progress"] if self.open else []
        told += [f"{self.held_back:,} held back by the script"] if self.held_back else []
        missing = sum(end - first for first, end in self.missing_ranges)
        told += [f"{len(self.twice):,} twice, {missing:,} missing"]
        return Verdict("each prompt is delivered to one step or dropped", ", ".join(told), self.breaches)

    def _gaps(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a deal that were never taken."""
        known = sorted(group for group in self.taken | self.held | self.missing if first <= group < end)
        for one, other in pairwise([first - 1, *known, end]):
            if other > one + 1:
                yield one + 1, other

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

    def _settle(self, groups: Sequence[int], where: str, what: str) -> None:
        for group in groups:
            if group not in self.taken:
                self.breaches.append(f"{where}: group {group} is {what}, but was never drawn")
            self.open.discard(group)

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
    """The versions of one stream of rollouts."""

    ahead: int
    published: list[int] = field(default_factory=list)
    """Versions published since it was opened that count for staleness."""


@dataclass
class VersionAudit:
    """Published versions, and the staleness of delivered rows."""

    configured: int | None
    streams: dict[int | None, _Stream] = field(default_factory=dict)
    last: dict[int | None, int] = field(default_factory=dict)
    """Last version of each stream, across all processes of the run."""
    count: int = 0
    largest: int | None = None
    bound: int | None = None
    falls: list[str] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)

    def enter(self, happening: Happening, where: str) -> None:
        """Apply an event."""
        stream = happening.stream
        if happening.what == "begin":
            self.streams = {}
        elif happening.what == "open":
            self.streams[stream] = _Stream(happening.ahead)
            self.bound = max(happening.ahead, self.bound or 0)
        elif happening.what == "publish":
            self._publish(happening, where)
        elif happening.what == "deliver":
            self._deliver(happening, where)

    def check_metrics(self, metrics: Sequence[MetricsLine]) -> None:
        """Compare recorded staleness and the configured bound with the streams'."""
        bound = self.bound if self.bound is not None else 0
        self.too_old += [
            f"step {line.step}: metrics.jsonl has staleness_max = {line.staleness_max:g}, and ahead = {bound}"
            for line in metrics
            if line.staleness_max is not None and line.staleness_max > bound
        ]
        # Check the last process only: a resumed run may change `ahead`, and config.toml contains the last one's.
        for number, stream in self.streams.items():
            if self.configured is not None and stream.ahead > self.configured:
                self.too_old.append(
                    f"stream {number} was opened with ahead = {stream.ahead}, and config.toml has {self.configured}"
                )

    def verdicts(self) -> Iterator[Verdict]:
        """The results of both checks."""
        last = ", ".join(f"the last {version}" for version in self.last.values())
        published = (
            f"{self.count:,} published to streams, {last}" if self.count else "nothing was published to a stream"
        )
        yield Verdict("versions never fall", published, self.falls)
        seen = (
            "no stream delivered anything" if self.largest is None else f"at most {self.largest}, ahead = {self.bound}"
        )
        yield Verdict("no delivered row is older than the bound", seen, self.too_old)

    def _publish(self, happening: Happening, where: str) -> None:
        last = self.last.get(happening.stream, happening.version)
        if happening.version < last:
            self.falls.append(f"{where}: version {happening.version} is published after version {last}")
        self.last[happening.stream] = happening.version
        self.count += 1
        if happening.stream not in self.streams:
            self.falls.append(
                f"{where}: version {happening.version} is published to stream {happening.stream}, which was never "
                "opened"
            )
        elif happening.counts:
            self.streams[happening.stream].published.append(happening.version)

    def _deliver(self, happening: Happening, where: str) -> None:
        stream = self.streams.get(happening.stream)
        if stream is None:
            self.too_old.append(f"{where}: stream {happening.stream} delivers, but was never opened")
            return
        # Versions published after the oldest token and before the delivery. At most as many as the trainer knew of.
        age = len(stream.published) - bisect_right(stream.published, happening.version)
        oldest = max(age, happening.staleness)
        self.largest = max(oldest, self.largest or 0)
        if oldest > stream.ahead:
            groups = ", ".join(str(group) for group in in_ranges(happening.groups))
            self.too_old.append(
                f"{where}: of groups {groups} the oldest token is {oldest} publications behind, and ahead = "
                f"{stream.ahead}"
            )
        elif age > happening.staleness:
            self.too_old.append(
                f"{where}: a staleness of {happening.staleness} is recorded, but by the versions published since "
                f"version {happening.version} it is {age}"
            )


@dataclass
class StepAudit:
    """The step numbers."""

    numbers: list[int] = field(default_factory=list)
    recorded: int = 0
    breaches: list[str] = field(default_factory=list)

    def enter(self, account: StepAccount) -> str:
        """Add the next account, and return its name."""
        if account.step is None:
            return f"after step {self.numbers[-1]}" if self.numbers else "before the first step"
        if self.numbers and account.step not in (self.numbers[-1] + 1, 0):
            self.breaches.append(f"step {account.step} comes after step {self.numbers[-1]} in groups.jsonl")
        self.numbers.append(account.step)
        return f"step {account.step}"

    def check_metrics(self, metrics: Sequence[MetricsLine]) -> None:
        """Check that the lines of metrics.jsonl are steps in order. A script need not record every step."""
        self.recorded = len(metrics)
        coming = iter(self.numbers)
        before = "the beginning"
        for line in metrics:
            if line.step not in coming:  # this consumes all steps up to the line's
                self.breaches.append(
                    f"step {line.step} comes after {before} in metrics.jsonl: no step is left for that place"
                )
                return
            before = f"step {line.step}"

    def verdict(self) -> Verdict:
        """The result of this check."""
        told = f"{len(self.numbers):,} steps, {self.recorded:,} of them recorded"
        return Verdict("steps follow each other", told, self.breaches)


def _named(first: int, end: int) -> str:
    return f"group {first} was" if end == first + 1 else f"groups {first} to {end - 1} were"
