"""Pack rows into micro-batches of about equal duration, because a pipeline has the speed of its slowest one."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Ragged
from meshrl_megatron.shape import Decoder
from meshrl_torch.estimate.flops import layer_flops
from meshrl_torch.model.packing import MicroBatch, Rows, packed

Ints = NDArray[np.int64]

_FILLED = 4
"""Micro-batches for each stage, if there are enough rows. The pipeline then idles for a fifth of the time."""


@dataclass(frozen=True)
class Balance:
    """Divides rows by the work of a layer: matrices for each token, attention for each pair of tokens.

    Families share their prompt, so they stay together unless they are too large.
    """

    per_token: float
    """Multiplications and additions of a layer for each token."""
    per_pair: float
    """The same for a query and a key that it sees."""
    fewest: int
    """Fewest micro-batches, if there are as many families."""

    @classmethod
    def of(cls, shape: Decoder, stages: int) -> "Balance":
        """Make it for a decoder in this many stages."""
        ffn = shape.ffn * max(shape.chosen, 1)  # of all experts that a token is routed to
        token, pair = layer_flops(shape.hidden, shape.heads, shape.groups, shape.head_dim, ffn)
        return cls(token, pair, _FILLED * stages if stages > 1 else 1)

    def __call__(self, tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
        """Yield micro-batches of at most `budget` tokens. A longer row gets its own."""
        for part in self._parts(rows, budget):
            yield packed(tokens, rows, part, learn)

    def _parts(self, rows: Rows, budget: int) -> list[Ints]:
        lots = [lot for family in _families(rows) for lot in _lots(rows, family, budget)]
        if not lots:
            return []
        sizes = [_tokens(rows, lot) for lot in lots]
        works = [self.work(rows, lot) for lot in lots]
        count = max(-(-sum(sizes) // budget), min(self.fewest, len(lots)))
        bins: list[tuple[float, int]] = [(0.0, number) for number in range(count)]
        filled = [0] * count
        members: list[list[Ints]] = [[] for _ in range(count)]
        for number in sorted(range(len(lots)), key=lambda each: -works[each]):  # the longest first, to the least filled
            tried: list[tuple[float, int]] = []
            while bins and filled[bins[0][1]] and filled[bins[0][1]] + sizes[number] > budget:
                tried.append(heapq.heappop(bins))
            work, where = heapq.heappop(bins) if bins else (0.0, len(filled))
            if where == len(filled):
                filled.append(0)
                members.append([])
            filled[where] += sizes[number]
            members[where].append(lots[number])
            for each in (*tried, (work + works[number], where)):
                heapq.heappush(bins, each)
        return [np.sort(np.concatenate(each)) for each in members if each]

    def work(self, rows: Rows, lot: Ints) -> float:
        """Multiplications and additions of a layer for some rows of one family."""
        prefix = int(rows.prefix[lot[0]])
        own = rows.inputs[lot] - rows.prefix[lot]
        pairs = float((own * rows.prefix[lot] + own * (own + 1) / 2).sum()) + prefix * (prefix + 1) / 2
        return self.per_token * _tokens(rows, lot) + self.per_pair * pairs


def _families(rows: Rows) -> list[Ints]:
    """Return the rows of each family, numbers of `rows`."""
    order = np.argsort(rows.family, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(rows.family[order])) + 1) if len(order) else []


def _tokens(rows: Rows, lot: Ints) -> int:
    return int((rows.inputs[lot] - rows.prefix[lot]).sum() + rows.prefix[lot[0]])


def _lots(rows: Rows, family: Ints, budget: int) -> Iterator[Ints]:
    """Divide a family into lots of at most `budget` tokens, each with its copy of the prompt."""
    start, filled = 0, int(rows.prefix[family[0]])
    for number, own in enumerate((rows.inputs[family] - rows.prefix[family]).tolist()):
        if number > start and filled + own > budget:
            yield family[start:number]
            start, filled = number, int(rows.prefix[family[0]])
        filled += own
    yield family[start:]
