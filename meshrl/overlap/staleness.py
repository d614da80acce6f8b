"""The staleness bound: which prompts may be sampled, and which groups form the next batch.

A version here counts publications: 0 before the first, then 1, 2, ... Weights have other numbers, which may increase by
more than one.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from meshrl.errors import DataError

Late: TypeAlias = Literal["wait", "drop"]
"""How to treat a group that would be too old for the following batch: the batch waits for it, or it is dropped."""


@dataclass
class Group:
    """The completions of one prompt, from the draw on."""

    version: int
    """A lower bound of the version of its oldest token. Exact once the group is finished."""
    finished: bool = False


class StalenessLedger:
    """Counts the running, ready and delivered groups. It needs no clock and no tasks.

    Prompts are drawn while `accepted + running <= (ahead + version + 1) * size`, where accepted groups are ready or
    delivered (AReaL, arXiv:2505.24298, equation 3). No delivered token is more than `ahead` publications behind the
    trainer's weights. A publication counts for this once it is announced, so one that is still on its way does not
    loosen the bound.
    """

    def __init__(self, size: int, ahead: int, late: Late = "wait") -> None:
        """`size`: groups in a batch."""
        self.size = size
        self.ahead = ahead
        self.late = late
        self.groups: dict[int, Group] = {}
        """The running and ready groups by label, in the order in which they were drawn."""
        self.ready: int = 0
        """Number of finished groups that are not delivered."""
        self.batches: int = 0
        self.delivered: int = 0
        """Number of delivered groups."""
        self.dropped: Counter[str] = Counter()
        self.waited: int = 0
        """Number of full batches that waited for a group that would have been too old for the next one."""
        self.floor = 0
        """Lower bound of the number of weights: in a resumed run, the number of its checkpoint's."""
        self._waits = False
        self._published: list[int] = []
        self.arriving: int | None = None
        """The number of weights that the sampler is loading: some of its ranks may have them already."""
        self._announced = 0
        self._last_trained = -1
        """The version that the last batch trains."""
        self._begun = False
        self.taken: int = 0
        """Groups of the batch that is being delivered in parts. 0 between two batches."""

    @property
    def version(self) -> int:
        """Number of publications."""
        return len(self._published)

    @property
    def published(self) -> int:
        """The number of the newest published weights."""
        return self._published[-1] if self._published else self.floor

    @property
    def trainer(self) -> int:
        """The version that the next groups train, even if nobody has begun to publish the result of the last batch."""
        return max(self.version + self._announced, self._last_trained + (not self.taken))

    @property
    def capacity(self) -> int:
        """Number of groups that may have been drawn by now, without dropped ones.

        Publishing more often than once for each batch gives no more room.
        """
        return (self.ahead + min(self.version, self.batches) + 1) * self.size

    @property
    def room(self) -> int:
        """Number of groups that may be drawn now."""
        return max(0, self.capacity - self.delivered - len(self.groups))

    @property
    def running(self) -> int:
        """Number of unfinished groups."""
        return len(self.groups) - self.ready

    def why_no_batch(self) -> str:
        """Describe what a batch waits for. If it is a publication that nobody has begun, say what to call."""
        counts = f"{self.ready} of {self.size} groups are ready, {self.running} run"
        if self.running or self.room or self._announced or self.version >= self.batches:
            return counts
        return (
            f"{counts}. Nothing was published after the last update (delivered batches: {self.batches}, publications: "
            f"{self.version}), so no more may be drawn: call `await publish(policy, stream)` after each update"
        )

    def announce(self) -> bool:
        """Announce a publication. Returns True if it counts, which it does not before the first draw."""
        self._announced += self._begun
        return self._begun

    def withdraw(self, counts: bool) -> None:
        """Withdraw a publication. `counts`: what `announce` returned."""
        self._announced -= counts

    def check(self, weights: int) -> None:
        """Raise DataError if weights of this number cannot follow the published ones."""
        if self._published and weights < self._published[-1]:
            raise DataError(
                f"weights of version {weights} were published after those of version {self._published[-1]}: versions "
                "must not fall, because the age of a token would be wrong"
            )

    def publish(self, weights: int) -> None:
        """Count weights of this number, announced before, which the sampler now has."""
        self._announced -= 1
        self.arriving = None
        self._published.append(weights)

    def version_of(self, weights: int) -> int:
        """Return the number of publications up to the weights of this number, with the one that is being loaded."""
        return bisect_right(self._published, weights) + (self.arriving is not None and weights >= self.arriving)

    def draw(self, label: int) -> None:
        """Count a group that is being generated."""
        if label in self.groups:
            raise DataError(
                f"group {label} was drawn again while it was in progress: give each prompt its own number in `groups`"
            )
        self._begun = True
        self.groups[label] = Group(self.version)

    def finish(self, label: int, oldest: int) -> None:
        """Count a complete group. Weights of number `oldest` sampled its oldest token.

        DataError if these are older than those of the checkpoint that the run resumed from.
        """
        if oldest < self.floor:
            raise DataError(
                f"group {label} was sampled by weights of version {oldest}, but the checkpoint was written after "
                f"version {self.floor} was published: call `await publish(policy, sampler)` before the first batch"
            )
        group = self.groups[label]
        group.version = self.version_of(oldest)
        group.finished = True
        self.ready += 1

    def remove(self, label: int) -> None:
        """Remove a group that was delivered or dropped, or lost and will be drawn again."""
        self.ready -= self.groups.pop(label).finished

    def drop(self, labels: Iterable[int], why: str) -> None:
        """Drop groups that will not be delivered. Others may be drawn instead."""
        for label in labels:
            self.remove(label)
            self.dropped[why] += 1

    def too_old(self) -> list[int]:
        """Return the finished groups that are too old to train on."""
        if not self.ready:
            return []
        oldest = self.trainer - self.ahead
        return [label for label, group in self.groups.items() if group.finished and group.version < oldest]

    def take(self, *, rest: bool = False, parts: int = 1) -> list[int] | None:
        """Return the groups of the next batch, in the order they were drawn. None if it has to wait.

        Groups that will be too old soonest come first. With `late="wait"`, a batch also waits if a running group would
        be too old for the batches after it. `rest`: nothing more will be drawn, so the last batch may be smaller. With
        `parts`, the batch comes in at most as many: each call returns all that it can of the rest of the batch.
        """
        left = self.size - self.taken
        left = min(left, len(self.groups)) if rest else left
        least = min(left, -(-self.size // parts))
        if self.ready < least or not left:
            return None
        finished = [label for label, group in self.groups.items() if group.finished]
        finished.sort(key=lambda label: self._last(self.groups[label]))
        for count in range(min(left, len(finished)), least - 1, -1):
            chosen = set(finished[:count])
            if self.late == "drop" or self._in_time(chosen, left - count):
                taken = [label for label in self.groups if label in chosen]
                self._deliver(taken, rest, parts)
                return taken
            self._waits |= count == left
        return None

    def take_these(self, labels: Sequence[int], *, rest: bool = False, parts: int = 1) -> bool:
        """Make these groups the next batch, or a part of it, as `take` would. False if some are not finished."""
        if not all(label in self.groups and self.groups[label].finished for label in labels):
            return False
        self._deliver(labels, rest, parts)
        return True

    def end_batch(self) -> None:
        """End the batch that is being delivered: the next group belongs to another."""
        self.taken = 0

    def _deliver(self, labels: Sequence[int], rest: bool, parts: int) -> None:
        self._last_trained = self.trainer
        self.waited += self._waits
        self._waits = False
        for label in labels:
            self.remove(label)
        self.delivered += len(labels)
        self.batches += not self.taken
        self.taken += len(labels)
        if parts == 1 or self.taken == self.size or (rest and not self.groups):
            self.end_batch()

    def staleness(self, weights: Sequence[int]) -> list[int]:
        """Return how many publications behind the last batch the tokens of these weights were."""
        return [self._last_trained - self.version_of(each) for each in weights]

    def _last(self, group: Group) -> int:
        """Return the last version of the trainer that may train on a group."""
        return group.version + self.ahead

    def _in_time(self, chosen: set[int], spare: int) -> bool:
        """True if all other groups can still be trained in time, or if no choice achieves that.

        `spare`: the number of them that this batch will still take.
        """
        now = self.trainer
        last = sorted((self._last(group), label) for label, group in self.groups.items() if self._last(group) >= now)
        others = [version for version, label in last if label not in chosen]
        best = [version for version, _ in last[len(chosen) + spare :]]
        return self._fit(others[spare:], now + 1) or not self._fit(best, now + 1)

    def _fit(self, last: Sequence[int], first: int) -> bool:
        """True if groups fit into batches from version `first` on. `last`: the last version for each, ascending."""
        return all(version >= first + index // self.size for index, version in enumerate(last))
