"""How rows are divided over a role's ranks: by tokens, or by the operations that the model needs for them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import numpy as np

from meshrl import log
from meshrl.data import Batch
from meshrl.mesh import Plan, Planner, Rows, even_plan, make_plan
from meshrl.roles.config import PassConfig, RoleConfig
from meshrl.roles.registry import function_of

_UNIT: Final = 1024
"""Parts of a token in which costs are counted."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a model's forward pass. A backward pass takes a multiple of them."""

    per_token: float
    """Of the matrices, for each token."""
    per_pair: float
    """Of attention, for each token and each token that it sees, itself included."""
    per_near_pair: float = 0.0
    """The same in layers in which a token sees only the last `window` tokens."""
    window: int = 0
    """Tokens that a token sees in such layers."""

    def costs(self, lengths: Rows) -> Rows:
        """Return the cost of rows with these lengths, int64[rows], in 1/1024 of the operations `per_token`."""
        own = lengths.astype(np.float64)
        hidden = np.maximum(own - self.window, 0.0)  # tokens that the last one does not see
        pairs = own * (own + 1) / 2
        attention = self.per_pair * pairs + self.per_near_pair * (pairs - hidden * (hidden + 1) / 2)
        costs: Rows = np.rint(_UNIT * (own + attention / self.per_token)).astype(np.int64)
        return costs


def fair_plan(batch: Batch, parts: int, flops: Flops) -> Plan:
    """Return the row numbers of parts that are balanced by operations.

    The costliest part costs at most as much as in `batch.plan(parts)`, which is returned if it is as good. DataError
    for fewer than one part.
    """
    costs = flops.costs(batch.lengths)
    by_tokens = batch.plan(parts)
    return min(by_tokens, even_plan(costs, parts), key=lambda plan: max(int(costs[rows].sum()) for rows in plan))


async def planner_of(config: RoleConfig) -> Planner:
    """Return the function that divides the rows of a role's calls as `balance` says.

    They are divided by tokens if the backend counts no operations. ModelError if the model's configuration cannot be
    read, which may download it first.
    """
    if not isinstance(config, PassConfig) or config.balance == "tokens":
        return make_plan
    if (counts := function_of(config.backend, "FLOPS")) is None:
        log.warning("rows are divided by tokens, because the backend counts no operations", backend=config.backend)
        return make_plan
    return partial(_plan, cast("Flops", await asyncio.to_thread(counts, config)))


def _plan(flops: Flops, values: Mapping[str, object], parts: int, owners: Rows | None) -> Plan:
    """Plan a call by the operations of its first batch, unless the caller has chosen the rows' owners."""
    batch = next((value for value in values.values() if isinstance(value, Batch)), None)
    if owners is None and batch is not None:
        owners = np.empty(len(batch), np.int64)
        for part, rows in enumerate(fair_plan(batch, parts, flops)):
            owners[rows] = part
    return make_plan(values, parts, owners)
