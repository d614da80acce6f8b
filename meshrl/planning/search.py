"""Find the best of many candidates with as few simulations as possible."""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from meshrl.simulation import Pace, lowest_cost

C = TypeVar("C")

SLACK: Final = 1e-9
"""Rounding."""


@dataclass(order=True)
class Found(Generic[C]):
    """A candidate that was simulated."""

    seconds: float
    """Of a step."""
    order: int
    candidate: C = field(compare=False)
    variant: int = field(compare=False)
    """Which of its variants fits."""


@dataclass
class Outcome(Generic[C]):
    """What a search found."""

    best: Sequence[Found[C]]
    """The fastest, the first one most."""
    simulated: int = 0
    pruned: int = 0
    """Left out because even their lower bound is longer than the steps of the best."""
    refused: int = 0
    """Do not fit into memory, or are not to be had."""


def search(
    candidates: Iterable[C],
    bound: Callable[[C], float],
    fits: Callable[[C], int | None],
    simulated: Callable[[C, int], float],
    keep: int,
) -> Outcome[C]:
    """The `keep` candidates with the shortest steps: those that simulating all of them would give.

    `bound`: seconds that no step of the candidate is below. `fits`: which of its variants fits, None where none does;
    asked of few. `simulated`: the seconds of its steps.
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
    """The rows of a step."""

    drawn: float
    trained: float


def lower_bound(pace: Pace, rows: Demand, shares: tuple[int, int], *, ahead: int, shared: bool, steps: int) -> float:
    """Seconds that the mean of `steps` simulated steps is not below.

    Each step trains its rows, and the script does its own work. All but `ahead + 1` of as many batches as there are
    steps are drawn meanwhile: beside that where the rollouts are ahead, else before it. `shares`: into how many the
    rows are divided to be trained, and to be drawn. An update lasts until the fullest share is trained.
    """
    share = rows.trained / shares[0]
    if rows.trained.is_integer():  # else steps have other numbers of rows, of which this is the mean
        share = math.ceil(share)
    train = lowest_cost(pace.works_of("Policy", "update"), share)
    draw = lowest_cost(pace.works_of("Sampler", "generate"), rows.drawn / shares[1])
    own = min((work.seconds[0] for work in pace.own), default=0.0)
    if not ahead:
        return train + draw + own
    drawn = draw * max(0, steps - ahead - 1) / steps
    return train + drawn if shared else max(train + own, drawn)
