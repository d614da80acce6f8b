"""The invariant checker: a policy that records what it is trained on, and checks the stream's guarantees."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshrl.algo import Loss
from meshrl.data import Batch, LossResult, Metrics, Weights
from meshrl.roles import Policy, Step

_AGAIN: Final = "; if the script trains rows again, see docs/testing.md"


class PromiseBroken(AssertionError):
    """The trained rows violate the stream's guarantees."""


def require(holds: bool, text: str) -> None:
    """Raise `PromiseBroken` unless the condition holds."""
    if not holds:
        raise PromiseBroken(text)


@dataclass(frozen=True)
class TrainedRow:
    """One row of one update."""

    group: int
    oldest: int
    """Version of the weights that sampled its oldest token."""
    published: int
    """Number of publications of newer weights than those."""
    step: int
    """Number of publications so far. Updates between two publications are one step of the script."""


class Witness(Policy):
    """Wraps a policy, on a mesh or not, and records the age of each row that it is trained on.

    `witness.prompts(...)` records the drawn prompts. `witness.check(...)` raises `PromiseBroken`. It saves nothing, so
    thousands of schedules write no files.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rows: list[TrainedRow] = []
        self.versions: list[int] = []
        """Versions of the weights, in the order of publication."""
        self.drawn: list[int] = []
        """Groups of the drawn prompts."""

    def prompts(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same batches of prompts, and record them."""
        for batch in batches:
            self.drawn += batch.groups.tolist()
            yield batch

    async def encode(self, batch: Batch) -> Batch:
        """Call the policy."""
        return await self.policy.encode(batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Call the policy after recording the rows. Needs `groups` and `oldest_version`."""
        await self._record(batch)
        return await self.policy.update(batch, loss)

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """Call the policy after recording the rows. Needs `groups` and `oldest_version`."""
        await self._record(batch)
        return await self.policy.forward_backward(batch, loss)

    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Metrics:
        """Call the policy."""
        return await self.policy.step(optimizer, adapter)

    async def _record(self, batch: Batch) -> None:
        known = await batch.load("groups", "oldest_version")
        step = len(self.versions)
        for group, oldest in zip(known.groups.tolist(), known.row("oldest_version").tolist(), strict=True):
            newer = sum(version > oldest for version in set(self.versions))
            self.rows.append(TrainedRow(group, oldest, newer, step))

    async def logprobs(self, batch: Batch) -> Batch:
        """Call the policy."""
        return await self.policy.logprobs(batch)

    async def weights(self, adapter: str | None = None) -> Weights:
        """Call the policy, and record the version as published."""
        weights = await self.policy.weights(adapter)
        self.versions.append(weights.version)
        return weights

    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Write nothing."""

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Call the policy."""
        await self.policy.checkpoint(folder, wait, adapter)

    async def written(self) -> None:
        """Call the policy."""
        await self.policy.written()

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        """Call the policy."""
        await self.policy.restore(folder, adapter, optimizer)

    def check(self, *, ahead: int, n: int, epochs: int = 1, dropped: int | None = 0) -> None:
        """Raise `PromiseBroken` unless the bound held, groups were whole and each prompt was trained once or dropped.

        Weights must have been published before the first row was trained.

        `n`: rows per group. `epochs`: number of times that a row is trained. `dropped`: number of groups that explain
        untrained prompts, `sum(stream.dropped.values())`. None if the script ended before the prompts did.
        """
        early = sum(row.step == 0 for row in self.rows)
        require(
            not early,
            f"{early} rows were trained before any weights were published: call `await publish(policy, sampler)` "
            "before the first batch",
        )
        old = [row for row in self.rows if row.published > ahead]
        require(
            not old, f"{len(old)} rows were more than ahead={ahead} publications behind; the first is {old[:1]}{_AGAIN}"
        )
        require(self.versions == sorted(self.versions), f"versions fell: {self.versions}")
        counts = Counter((row.group, row.step) for row in self.rows)
        parts = {group: count for (group, _), count in counts.items() if count != n * epochs}
        require(not parts, f"groups have {n} rows, each trained {epochs} times in a step; rows trained: {parts}")
        times = Counter(group for group, _ in counts)
        again = {group: count for group, count in times.items() if count > 1}
        require(not again, f"groups were trained in more than one step: {again}{_AGAIN}")
        if dropped is not None:
            lost = sorted(set(self.drawn) - set(times))
            require(
                len(lost) == dropped or not self.drawn,
                f"{len(lost)} prompts that were drawn were never trained, and {dropped} groups were dropped: {lost}",
            )
