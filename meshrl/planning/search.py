"""Find the best of many candidates with as few simulations as possible."""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from meshrl.planning.pace import Pace, lowest_cost

C = TypeVar("C")

SLACK: Final = 1e-9
"""Tolerance for rounding."""


@dataclass(order=True)
class Found(Generic[C]):
    """A simulated candidate."""

    seconds: float
    """Seconds per step."""
    order: int
    candidate: C = field(compare=False)
    variant: int = field(compare=False)
    """Index of the variant that fits."""


@dataclass
class Outcome(Generic[C]):
    """The result of a search."""

    best: Sequence[Found[C]]
    """The fastest candidates, in order."""
    simulated: int = 0
    pruned: int = 0
    """Number left out because their lower bound exceeds the steps of the best."""
    refused: int = 0
    """Number that do not fit into memory, or are not possible."""


def search(
    candidates: Iterable[C],
    bound: Callable[[C], float],
    fits: Callable[[C], int | None],
    simulated: Callable[[C, int], float],
    keep: int,
) -> Outcome[C]:
    """Find the `keep` candidates with the shortest steps. The result is the same as if all were simulated.

    `bound`: a lower bound for the candidate's steps, in seconds. `fits`: the variant that fits, None if none does;
    called for few candidates. `simulated`: the seconds of its steps.
    """
    ordered = sorted(((bound(each), order, each) for order, each in enumerate(candidates)), key=lambda each: each[:2])
    best: list[Found[C]] = []
    found = Outcome[C](best)
    for at, (least, order, candidate) in enumerate(ordered):
        if len(best) == keep and least > best[-1].seconds + SLACK:
            found.pruned = len(ordered) - at
            break
        variant = fits(candidate)
        if variant is None:
            found.refused += 1
            continue
        found.simulated += 1
        insort(best, Found(simulated(candidate, variant), order, candidate, variant))
        del best[keep:]
    return found


@dataclass(frozen=True)
class Demand:
    """The number of rows in a step."""

    drawn: float
    trained: float


def lower_bound(pace: Pace, rows: Demand, shares: tuple[int, int], *, ahead: int, shared: bool, steps: int) -> float:
    """A lower bound for the mean of `steps` simulated steps, in seconds.

    Each step trains its rows, and the script does its own work. All batches except `ahead + 1` are drawn within these
    steps: concurrently if rollouts run ahead, else before training. `shares`: the number of shares into which rows are
    divided for training and for drawing. An update lasts until the fullest share is trained.
    """
    share = rows.trained / shares[0]
    if rows.trained.is_integer():  # else the number of rows varies between steps, and this is the mean
        share = math.ceil(share)
    train = lowest_cost(pace.works_of("Policy", "update"), share)
    draw = lowest_cost(pace.works_of("Sampler", "generate"), rows.drawn / shares[1])
    own = min((work.seconds[0] for work in pace.own), default=0.0)
    if not ahead:
        return train + draw + own
    drawn = draw * max(0, steps - ahead - 1) / steps
    return train + drawn if shared else max(train + own, drawn)
