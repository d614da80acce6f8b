"""The staleness bound: which prompts may be sampled, and which groups form the next batch.

A version here is a count of what was published: 0 before the first, then 1, 2, ... Weights have numbers of their own,
which may grow by several at once.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from meshrl.errors import DataError

Late: TypeAlias = Literal["wait", "drop"]
"""What becomes of a group that would be too old for the batch after: the batch waits for it, or it is dropped."""


@dataclass
class Group:
    """The completions of one prompt, from when it is drawn."""

    version: int
    """What its oldest token cannot be older than; once it is finished, the version of that token."""
    finished: bool = False


class StalenessLedger:
    """Counts the groups that are running, ready and delivered. Knows no time and no tasks.

    Prompts are drawn while `accepted + running <= (ahead + version + 1) * size`, where what is ready or delivered has
    been accepted (AReaL, arXiv:2505.24298, equation 3). What is delivered has no token that is more than `ahead`
    publications behind the trainer's weights. A publication counts for that as soon as it is announced, so that one
    that is still on its way does not loosen the bound.
    """

    def __init__(self, size: int, ahead: int, late: Late = "wait") -> None:
        """`size`: groups in a batch."""
        self.size = size
        self.ahead = ahead
        self.late = late
        self.groups: dict[int, Group] = {}
        """What is running or ready, by its label, in the order in which it was drawn."""
        self.ready: int = 0
        """Groups that are finished and not delivered."""
        self.batches: int = 0
        self.delivered: int = 0
        """Groups of all batches."""
        self.dropped: Counter[str] = Counter()
        self.waited: int = 0
        """Batches that were full, and waited for a group that would have been too old for the next."""
        self.floor = 0
        """The number of weights that nothing may be older than: in a run that goes on, those of its checkpoint."""
        self._waits = False
        self._published: list[int] = []
        self._announced = 0
        self._last_trained = -1
        """The version that the batch taken last trains."""
        self._begun = False

    @property
    def version(self) -> int:
        """How often weights were published."""
        return len(self._published)

    @property
    def published(self) -> int:
        """The number of the weights that were published last."""
        return self._published[-1] if self._published else self.floor

    @property
    def trainer(self) -> int:
        """The version that the next batch trains: also where nobody has begun to publish what the last one made."""
        return max(self.version + self._announced, self._last_trained + 1)

    @property
    def capacity(self) -> int:
        """Groups that may have been drawn by now, without those that were dropped.

        Publishing more often than once a batch gives no room.
        """
        return (self.ahead + min(self.version, self.batches) + 1) * self.size

    @property
    def room(self) -> int:
        """Groups that may be drawn now."""
        return max(0, self.capacity - self.delivered - len(self.groups))

    @property
    def running(self) -> int:
        """Groups that are not finished."""
        return len(self.groups) - self.ready

    def why_no_batch(self) -> str:
        """What a batch waits for; where that is a publication that nobody has begun, what to call."""
        told = f"{self.ready} of {self.size} groups are ready, {self.running} run"
        if self.running or self.room or self._announced or self.version >= self.batches:
            return told
        return (
            f"{told}. Nothing was published after the last update (delivered batches: {self.batches}, publications: "
            f"{self.version}), so no more may be drawn: call `await publish(policy, stream)` after each update"
        )

    def announce(self) -> bool:
        """New weights will be published. Whether they count: what comes before the first draw is where that begins."""
        self._announced += self._begun
        return self._begun

    def withdraw(self) -> None:
        """Weights that were announced, and count, will not be published."""
        self._announced -= 1

    def check(self, weights: int) -> None:
        """DataError if weights of this number cannot follow those that were published."""
        if self._published and weights < self._published[-1]:
            raise DataError(
                f"weights of version {weights} were published after those of version {self._published[-1]}: versions "
                "must not fall, because the age of a token would be wrong"
            )

    def publish(self, weights: int) -> None:
        """Weights of this number, which were announced and count, have been given to the sampler."""
        self._announced -= 1
        self._published.append(weights)

    def version_of(self, weights: int) -> int:
        """How often weights had been published when those of this number were."""
        return bisect_right(self._published, weights)

    def draw(self, label: int) -> None:
        """A group is being generated."""
        if label in self.groups:
            raise DataError(
                f"group {label} was drawn again while it was in progress: give each prompt its own number in `groups`"
            )
        self._begun = True
        self.groups[label] = Group(self.version)

    def finish(self, label: int, oldest: int) -> None:
        """A group is complete; its oldest token was sampled by weights of this number.

        DataError where these are older than those of the checkpoint that the run goes on from.
        """
        if oldest < self.floor:
            raise DataError(
                f"group {label} was sampled by weights of version {oldest}, and when the checkpoint was written that "
                f"the run goes on from, those of version {self.floor} had been published: give the sampler the "
                "restored weights before the first batch, by `await publish(policy, sampler)`"
            )
        group = self.groups[label]
        group.version = self.version_of(oldest)
        group.finished = True
        self.ready += 1

    def drop(self, labels: Iterable[int], why: str) -> None:
        """Groups will not be delivered: others may be drawn for them."""
        for label in labels:
            self._remove(label)
            self.dropped[why] += 1

    def restart(self, label: int) -> None:
        """A group was lost on its way, and is to be drawn again."""
        self._remove(label)

    def too_old(self) -> list[int]:
        """The finished groups that may not be trained on any more."""
        if not self.ready:
            return []
        oldest = self.trainer - self.ahead
        return [label for label, group in self.groups.items() if group.finished and group.version < oldest]

    def take(self, *, rest: bool = False) -> list[int] | None:
        """The groups of the next batch, in the order they were drawn; None where it has to wait.

        Those that will be too old soonest come first. With `late="wait"` a batch also waits where a group that runs
        would be too old for those that follow. `rest`: nothing more will be drawn, the last batch may be smaller.
        """
        size = min(self.size, len(self.groups)) if rest else self.size
        if self.ready < size or not size:
            return None
        finished = [label for label, group in self.groups.items() if group.finished]
        chosen = set(sorted(finished, key=lambda label: self._last(self.groups[label]))[:size])
        if self.late == "wait" and not self._in_time(chosen):
            self._waits = True
            return None
        taken = [label for label in self.groups if label in chosen]
        self._deliver(taken)
        return taken

    def take_these(self, labels: Sequence[int]) -> bool:
        """Make these groups the next batch; False where they are not all finished."""
        if not all(label in self.groups and self.groups[label].finished for label in labels):
            return False
        self._deliver(labels)
        return True

    def _deliver(self, labels: Sequence[int]) -> None:
        self._last_trained = self.trainer
        self.waited += self._waits
        self._waits = False
        for label in labels:
            self._remove(label)
        self.delivered += len(labels)
        self.batches += 1

    def staleness(self, weights: Sequence[int]) -> list[int]:
        """How many publications tokens sampled by weights of these numbers were behind the batch taken last."""
        return [self._last_trained - self.version_of(each) for each in weights]

    def _remove(self, label: int) -> None:
        self.ready -= self.groups.pop(label).finished

    def _last(self, group: Group) -> int:
        """The last version of the trainer that may train it."""
        return group.version + self.ahead

    def _in_time(self, chosen: set[int]) -> bool:
        """Whether all others can still be trained in time, batch by batch; or some cannot, whatever is chosen."""
        now = self.trainer
        last = sorted((self._last(group), label) for label, group in self.groups.items() if self._last(group) >= now)
        others = [version for version, label in last if label not in chosen]
        best = [version for version, _ in last[self.size :]]
        return self._fit(others, now + 1) or not self._fit(best, now + 1)

    def _fit(self, last: Sequence[int], first: int) -> bool:
        """Whether groups, sorted by the version that may train them last, fit into batches from version `first` on."""
        return all(version >= first + index // self.size for index, version in enumerate(last))
