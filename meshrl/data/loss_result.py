"""What a loss computed for the rows of a batch."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from meshrl.data.batch import Batch
from meshrl.data.metrics import Metrics
from meshrl.mesh import HasRefs, Put, Rows


@dataclass(frozen=True, eq=False)
class LossResult(HasRefs):
    """What a loss computed for the rows of a batch: the result of `forward_backward`.

    Large columns stay on the ranks that made them, as those of a batch do.

        result = await policy.forward_backward(batch, loss)
        batch = batch.assign(logprobs=(await result.load()).rows["logprobs"])
    """

    rows: Batch
    """The batch's rows in their order, with `logprobs` and `losses` only: ragged float32, the policy's log-probability
    of each learned token and its loss before any normalisation. Both are 0 where `loss_mask` is False."""
    metrics: Metrics
    """`loss`, `rows`, `tokens`, and the means of the loss's metrics over learned tokens."""

    @classmethod
    def join(cls, parts: Sequence[Self], plan: Sequence[Rows] | None = None) -> Self:
        """Join the rows of all parts in the order of the batch, as `Batch.join` does, and average their metrics."""
        return cls(Batch.join([part.rows for part in parts], plan), Metrics.mean([part.metrics for part in parts]))

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """Return the same with each column of more than `limit` bytes as a reference only."""
        return replace(self, rows=self.rows.hold(put, limit, shares))

    async def load(self) -> Self:
        """Return the same with all columns readable here."""
        return replace(self, rows=await self.rows.load())

    def __deepcopy__(self, memo: object) -> Self:
        return replace(self, rows=copy.deepcopy(self.rows))
