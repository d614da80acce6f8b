"""Route rows to replicas of a sampler: to the one with the least outstanding work. Groups stay together."""

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
"""A group goes on where it was while that replica exceeds the lightest by one group, or by this part of the mean."""


@dataclass
class Share:
    """What a replica was given of one group, in one call."""

    replica: int
    rows: int
    """Completions that have not come back."""
    tokens: int
    """That each of them may draw."""


NOWHERE: Final[Mapping[int, Share]] = MappingProxyType({})
"""What was given where of groups that begin."""


class Router:
    """Counts what the replicas of a sampler have still to draw. Knows no time and no tasks.

    A completion that has not come back counts with its `max_tokens`: the most that it may draw, and all that is known
    of it before it ends.
    """

    def __init__(self, replicas: int) -> None:
        self.outstanding: Rows = np.zeros(replicas, np.int64)
        """Tokens that each replica may still draw, int64[replicas]."""

    @property
    def replicas(self) -> int:
        """How many there are."""
        return len(self.outstanding)

    def divide(
        self, prompts: Batch, sampling: Sampling, before: Mapping[int, Share] = NOWHERE, here: Rows | None = None
    ) -> Rows:
        """The replica of each row, int64[rows]: the costliest group first, each to the one with the least outstanding.

        `here`: the numbers of those that may be given rows; without it all.

        Of the replicas that are given rows none then exceeds the lightest by more than a group. A group of `before`
        goes where it was, unless that exceeds the lightest by more than the costliest group, or an eighth of the mean.
        Where nothing is outstanding, rows that begin are divided as those of any call: by the tokens that they have.
        """
        here = np.arange(self.replicas) if here is None else here
        outstanding = self.outstanding[here]
        owners = np.full(len(prompts), here[0])
        if len(here) == 1:
            return owners
        if not before and not outstanding.any():
            for replica, rows in zip(here.tolist(), prompts.plan(len(here)), strict=True):
                owners[rows] = replica
            return owners
        numbers: dict[int, int] = {}
        group = np.array([numbers.setdefault(label, len(numbers)) for label in prompts.groups.tolist()], np.int64)
        costs = np.zeros(len(numbers), np.int64)
        np.add.at(costs, group, _limits(prompts, sampling) * sampling.n)
        place = {replica: number for number, replica in enumerate(here.tolist())}
        homes = [place.get(before[label].replica, -1) if label in before else -1 for label in numbers]
        mean = int(outstanding.sum() + costs.sum()) // len(here)
        slack = max(int(costs.max(initial=0)), mean // _LEEWAY)
        taken: Rows = here[lightest(costs, outstanding, np.array(homes, np.int64), slack)[group]]
        return taken

    def give(self, prompts: Batch, sampling: Sampling, owners: Rows) -> dict[int, Share]:
        """Count the rows of a call, each on its replica; what was given of each group."""
        given: dict[int, Share] = {}
        limits = _limits(prompts, sampling).tolist()
        for label, replica, tokens in zip(prompts.groups.tolist(), owners.tolist(), limits, strict=True):
            share = given.setdefault(label, Share(replica, 0, tokens))
            share.rows += sampling.n
            self.outstanding[share.replica] += sampling.n * share.tokens
        return given

    def take(self, given: Mapping[int, Share], labels: Iterable[int]) -> None:
        """Rows of these groups have come back, a label for each. DataError for one that the call does not have."""
        for label in labels:
            if label not in given:
                raise DataError(
                    f"the sampler yielded a row of group {label}, and its call has {', '.join(map(str, given))}: make "
                    "rollouts from the rows of the prompts, by repeat, select and assign"
                )
            share = given[label]
            share.rows -= 1
            self.outstanding[share.replica] -= share.tokens

    def end(self, shares: Iterable[Share]) -> None:
        """Nothing more will come of these."""
        for share in shares:
            self.outstanding[share.replica] -= share.rows * share.tokens
            share.rows = 0


def _limits(prompts: Batch, sampling: Sampling) -> Rows:
    """The most tokens that each row's completion may have, int64[rows]."""
    own = prompts.row("max_tokens") if "max_tokens" in prompts else sampling.max_tokens
    return np.broadcast_to(np.asarray(own, np.int64), len(prompts))
