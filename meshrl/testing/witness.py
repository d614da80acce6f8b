"""A witness: a policy that records what it is trained on, and checks the stream's guarantees."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss
from meshrl.roles import Policy
from meshrl.weights import Weights


class PromiseBroken(AssertionError):
    """What was trained is not what the stream promises."""


@dataclass(frozen=True)
class Trained:
    """One row, given to one update."""

    group: int
    oldest: int
    """The number of the weights that sampled its oldest token."""
    published: int
    """How often newer weights than those had been published."""
    step: int
    """How often weights had been published at all: the updates between two times are one step of the script."""


class Witness(Policy):
    """Stands for a policy, on a mesh or not, and keeps for each row that it is trained on how old it was.

    `witness.prompts(...)` notes which prompts were drawn. `witness.check(...)` raises `PromiseBroken`. It
    saves nothing, so that thousands of schedules write no files.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rows: list[Trained] = []
        self.versions: list[int] = []
        """Of the weights, as they were published."""
        self.drawn: list[int] = []
        """The groups of the prompts that were drawn."""

    def prompts(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches of prompts, noted as they are drawn."""
        for batch in batches:
            self.drawn += batch.groups.tolist()
            yield batch

    async def encode(self, batch: Batch) -> Batch:
        """The policy's."""
        return await self.policy.encode(batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """The policy's, after the rows are noted. Needs `groups` and `oldest_version`."""
        known = await batch.load("groups", "oldest_version")
        step = len(self.versions)
        for group, oldest in zip(known.groups.tolist(), known.row("oldest_version").tolist(), strict=True):
            newer = sum(version > oldest for version in set(self.versions))
            self.rows.append(Trained(group, oldest, newer, step))
        return await self.policy.update(batch, loss)

    async def logprobs(self, batch: Batch) -> Batch:
        """The policy's."""
        return await self.policy.logprobs(batch)

    async def weights(self) -> Weights:
        """The policy's; their version is noted as published."""
        weights = await self.policy.weights()
        self.versions.append(weights.version)
        return weights

    async def save(self, folder: str) -> None:
        """Write nothing."""

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """The policy's."""
        await self.policy.checkpoint(folder, wait)

    async def written(self) -> None:
        """The policy's."""
        await self.policy.written()

    async def restore(self, folder: str) -> None:
        """The policy's."""
        await self.policy.restore(folder)

    def check(self, *, ahead: int, n: int, epochs: int = 1, dropped: int | None = 0) -> None:
        """Raise `PromiseBroken` unless the bound held, groups were whole and each prompt was trained once or dropped.

        `n`: rows of a group. `epochs`: how often a row is trained. `dropped`: groups that account for prompts that were
        not trained, `sum(stream.dropped.values())`; None where the script ended before the prompts did.
        """
        old = [row for row in self.rows if row.published > ahead]
        _require(not old, f"{len(old)} rows were more than ahead={ahead} publications behind; the first is {old[:1]}")
        _require(self.versions == sorted(self.versions), f"versions fell: {self.versions}")
        counts = Counter((row.group, row.step) for row in self.rows)
        parts = {group: count for (group, _), count in counts.items() if count != n * epochs}
        _require(not parts, f"groups have {n} rows, each trained {epochs} times in a step; rows trained: {parts}")
        times = Counter(group for group, _ in counts)
        again = {group: count for group, count in times.items() if count > 1}
        _require(not again, f"groups were trained in more than one step: {again}")
        if dropped is not None:
            lost = sorted(set(self.drawn) - set(times))
            _require(
                len(lost) == dropped or not self.drawn,
                f"{len(lost)} prompts that were drawn were never trained, and {dropped} groups were dropped: {lost}",
            )


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise PromiseBroken(text)
