"""The tokens of a micro-batch that a rank along `cp` computes: the first and the last pieces of each segment.

A causal segment is cut into twice as many pieces as there are ranks. A rank gets one from the front and its mirror from
the back, so all attend to about as many keys (the zig-zag split). Keys and values are gathered from all ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl_torch.model.attention import Group, Packed, moved
from meshrl_torch.model.packing import MicroBatch, groups_of, runs

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """The part of a micro-batch that a rank computes."""

    ids: Tensor
    """int64[1, T]."""
    positions: Tensor
    """int64[1, T]."""
    attend: Packed
    """Attention. Its keys are numbered as in the states of all ranks, one after another."""
    source: Tensor
    """int64[n]: the token of this part that predicts."""
    target: Tensor
    """int64[n]: its target in the micro-batch."""
    targets: int
    """Number of targets of the whole micro-batch."""

    def to(self, device: torch.device) -> "Part":
        """Return the same with its tensors on the device."""
        ids, positions, source, target = (
            moved(each, device) for each in (self.ids, self.positions, self.source, self.target)
        )
        return Part(ids, positions, self.attend.to(device), source, target, self.targets)


def part_of(micro: MicroBatch, rank: int, ranks: int, multiple: int) -> Part:
    """Return the part of `rank`, of `ranks` along `cp`.

    All have the same number of tokens, a multiple of `multiple`. Padding tokens, each a separate segment, are added at
    the end if needed, and nobody reads them. For a single rank without padding, it is the micro-batch itself.
    """
    total = micro.ids.shape[1]
    if ranks == 1 and total % multiple == 0:
        count = len(micro.source)
        return Part(micro.ids, micro.positions, micro.attend, micro.source, torch.arange(count), count)
    pieces = _Pieces.of(micro.attend, ranks)
    tokens = [pieces.tokens(each) for each in range(ranks)]
    length = -(-max(map(len, tokens)) // multiple) * multiple
    where = np.empty(total, np.int64)  # of each packed token, among the states of all ranks
    for each, own in enumerate(tokens):
        where[own] = each * length + np.arange(len(own))
    own = tokens[rank]
    spare = length - len(own)
    places = np.full(total, -1)
    places[own] = np.arange(len(own))
    source = places[micro.source.numpy()]
    target = np.flatnonzero(source >= 0)
    return Part(
        ids=_filled(micro.ids, own, spare),
        positions=_filled(micro.positions, own, spare),
        attend=pieces.attend(rank, where, rank * length + len(own), spare),
        source=torch.from_numpy(source[target]),
        target=torch.from_numpy(target),
        targets=len(micro.source),
    )


@dataclass(frozen=True)
class _Pieces:
    """The places of all segments' pieces, int64[segments] or int64[segments, pieces + 1]."""

    start: Ints
    """Start of a segment's queries among the packed tokens."""
    before: Ints
    """Keys of a segment before its own tokens."""
    key_start: Ints
    """Start of a segment's keys in `keys`."""
    keys: Ints
    """The packed token of each key of each segment."""
    bounds: Ints
    """The bounds of a segment's pieces, from its start."""

    @classmethod
    def of(cls, attend: Packed, ranks: int) -> "_Pieces":
        counts = [group.count for group in attend.groups]
        queries = np.repeat([group.queries for group in attend.groups], counts)
        keys = np.repeat([group.keys for group in attend.groups], counts)
        pieces = 2 * ranks
        turn = np.arange(len(queries)) % pieces  # the piece that gets the token that is left over
        bounds = (np.arange(pieces + 1)[None] * queries[:, None] + turn[:, None]) // pieces
        seen = np.arange(int(keys.sum())) if attend.keys is None else attend.keys.numpy()
        start, key_start = np.cumsum(queries) - queries, np.cumsum(keys) - keys
        return cls(start, keys - queries, key_start, seen, bounds)

    def _own(self, rank: int) -> tuple[Ints, Ints, Ints]:
        """Return the non-empty pieces of a rank: their segments, and their bounds there."""
        mirror = self.bounds.shape[1] - 2 - rank
        segment = np.repeat(np.arange(len(self.start)), 2)
        begin = np.stack([self.bounds[:, rank], self.bounds[:, mirror]], 1).reshape(-1)
        end = np.stack([self.bounds[:, rank + 1], self.bounds[:, mirror + 1]], 1).reshape(-1)
        nonempty = end > begin
        order = np.lexsort((self.before[segment[nonempty]] + end[nonempty], (end - begin)[nonempty]))
        return segment[nonempty][order], begin[nonempty][order], end[nonempty][order]

    def tokens(self, rank: int) -> Ints:
        """Return a rank's packed tokens, in its order."""
        segment, begin, end = self._own(rank)
        return runs(self.start[segment] + begin, end - begin)

    def attend(self, rank: int, where: Ints, first_spare: int, spare: int) -> Packed:
        """Return the attention of a rank's tokens to keys at the places `where`."""
        segment, begin, end = self._own(rank)
        seen = self.before[segment] + end
        keys = where[self.keys[runs(self.key_start[segment], seen)]]
        groups = groups_of(end - begin, seen)
        if spare:
            keys = np.concatenate([keys, first_spare + np.arange(spare)])
            groups = (*groups, Group(spare, 1, 1))
        return Packed(groups, torch.from_numpy(keys))


def _filled(values: Tensor, own: Ints, spare: int) -> Tensor:
    return torch.cat([values[:, torch.from_numpy(own)], values.new_zeros(1, spare)], 1)
