"""Route rows to the replica of a sampler with the least outstanding work. Groups stay together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.mesh import Rows, lightest
from meshrl.roles import Sampling

_LEEWAY: Final = 8
"""A group stays on its replica while that exceeds the lightest by at most one group, or the mean divided by this."""


@dataclass
class Share:
    """The part of a group that one call gives to a replica."""

    replica: int
    rows: int
    """Completions that have not arrived."""
    tokens: int
    """Most tokens that each of them may have."""


NOWHERE: Final[Mapping[int, Share]] = MappingProxyType({})
"""No shares, for new groups."""


class Router:
    """Counts the outstanding work of a sampler's replicas. It needs no clock and no tasks.

    A completion that has not arrived counts with its `max_tokens`, because nothing else is known before it ends.
    """

    def __init__(self, replicas: int) -> None:
        self.outstanding: Rows = np.zeros(replicas, np.int64)
        """Tokens that each replica may still sample, int64[replicas]."""

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.outstanding)

    def divide(
        self, prompts: Batch, sampling: Sampling, before: Mapping[int, Share] = NOWHERE, available: Rows | None = None
    ) -> Rows:
        """Choose a replica for each row, int64[rows]: the costliest group first, each to the least outstanding work.

        `available`: the numbers of available replicas. Default: all.

        Afterwards no replica that got rows exceeds the lightest by more than one group. A group in `before` stays where
        it was, unless that replica exceeds the lightest by more than the costliest group, or an eighth of the mean. If
        nothing is outstanding, new rows are divided as in any call, by their present tokens.
        """
        available = np.arange(self.replicas) if available is None else available
        outstanding = self.outstanding[available]
        owners = np.full(len(prompts), available[0])
        if len(available) == 1:
            return owners
        if not before and not outstanding.any():
            for replica, rows in zip(available.tolist(), prompts.plan(len(available)), strict=True):
                owners[rows] = replica
            return owners
        numbers: dict[int, int] = {}
        group = np.array([numbers.setdefault(label, len(numbers)) for label in prompts.groups.tolist()], np.int64)
        costs = np.zeros(len(numbers), np.int64)
        np.add.at(costs, group, _limits(prompts, sampling) * sampling.n)
        place = {replica: number for number, replica in enumerate(available.tolist())}
        homes = [place.get(before[label].replica, -1) if label in before else -1 for label in numbers]
        mean = int(outstanding.sum() + costs.sum()) // len(available)
        slack = max(int(costs.max(initial=0)), mean // _LEEWAY)
        taken: Rows = available[lightest(costs, outstanding, np.array(homes, np.int64), slack)[group]]
        return taken

    def give(self, prompts: Batch, sampling: Sampling, owners: Rows) -> dict[int, Share]:
        """Count the rows of a call on their replicas. Returns the share of each group."""
        shares: dict[int, Share] = {}
        limits = _limits(prompts, sampling).tolist()
        for label, replica, tokens in zip(prompts.groups.tolist(), owners.tolist(), limits, strict=True):
            share = shares.setdefault(label, Share(replica, 0, tokens))
            share.rows += sampling.n
            self.outstanding[share.replica] += sampling.n * share.tokens
        return shares

    def take(self, shares: Mapping[int, Share], labels: Iterable[int]) -> None:
        """Count arrived rows, given the label of each. DataError for a group that the call does not have."""
        for label in labels:
            if label not in shares:
                raise DataError(
                    f"the sampler yielded a row of group {label}, and its call has {', '.join(map(str, shares))}: make "
                    "rollouts from the rows of the prompts, by repeat, select and assign"
                )
            share = shares[label]
            share.rows -= 1
            self.outstanding[share.replica] -= share.tokens

    def end(self, shares: Iterable[Share]) -> None:
        """Remove shares whose other rows will not arrive."""
        for share in shares:
            self.outstanding[share.replica] -= share.rows * share.tokens
            share.rows = 0


def _limits(prompts: Batch, sampling: Sampling) -> Rows:
    """Return the most tokens that each row's completion may have, int64[rows]."""
    own = prompts.row("max_tokens") if "max_tokens" in prompts else sampling.max_tokens
    return np.broadcast_to(np.asarray(own, np.int64), len(prompts))
