"""Divide rows into micro-batches, packed or padded.

Packed is one sequence without padding, in which shared beginnings are computed once. Padded is for models whose packed
rows would see each other.

The rows of one prompt, a family, share that prompt. Any rows may share more if that is long enough to be worth it: the
history of a conversation's branches, or a long system message.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import Ragged
from meshrl.errors import DataError
from meshrl_torch.model.attention import Group, Packed, moved
from meshrl_torch.model.positions import ANY

Ints = NDArray[np.int64]

_WORTH: Final = 32
"""Rows that share at least this many tokens beyond a prompt compute them once..."""
_PARTS: Final = 4
"""... and without such a prompt, at least the row's tokens divided by this, because sharing has a cost."""
_KEY: Final = 8
"""This many shared tokens beyond a prompt, whose keys and values are copied for each row, count as one token."""


@dataclass(frozen=True)
class Rows:
    """The rows to compute, and how much of each. All int64[rows], numbered as in the token column."""

    starts: Ints
    """The row's first token in the column."""
    inputs: Ints
    """Tokens that the model has to read: those before the row's last target."""
    prefix: Ints
    """How many of these the row shares with its family, as their prompt. 0 for a row without a family."""
    family: Ints
    """Rows with the same number share their prefix."""
    first: Ints
    """The row's first target, a position in the row. Targets end at position `inputs`."""
    beyond: NDArray[np.bool_]
    """bool[rows]: the whole row is longer than the model's native length. It shares nothing with rows that are not."""
    reader: Ints
    """The number of the adapter that reads the row. Rows of two adapters share no tokens."""
    mixed: bool = False
    """True if a pass may read rows of several adapters."""
    apart: bool = False
    """True if rows share only their prompt, because each row has other data for the same tokens, such as experts."""


@dataclass(frozen=True)
class MicroBatch:
    """B sequences of T tokens, and the N tokens that they predict. A token is predicted only once. Packed: B is 1."""

    ids: Tensor
    """int64[B, T]."""
    positions: Tensor
    """int64[B, T], restarting in each row."""
    attend: Packed
    """Without groups if each row is its own sequence, followed by padding."""
    source: Tensor
    """int64[N]: the token that predicts, a position in the flattened `ids`."""
    target: Ints
    """int64[N]: the predicted token, a position in the batch's token column."""
    read: Ints
    """int64[B * T]: the token of that column in each place."""
    beyond: Tensor | None = None
    """bool[B, T]: the tokens of rows longer than the model's native length. None: no row is."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the same with its tensors on the device."""
        ids, positions, source = (moved(each, device) for each in (self.ids, self.positions, self.source))
        beyond = None if self.beyond is None else moved(self.beyond, device)
        return replace(self, ids=ids, positions=positions, attend=self.attend.to(device), source=source, beyond=beyond)


Split: TypeAlias = Callable[[Ragged, Rows, Ragged | None, int], Iterator[MicroBatch]]
"""Divides rows of a token column into micro-batches of at most the given number of tokens, like `micro_batches`."""

IDLE: Final = MicroBatch(
    ids=torch.zeros(1, 2, dtype=torch.int64),
    positions=torch.arange(2)[None],
    attend=Packed((Group(1, 2, 2),)),
    source=torch.empty(0, dtype=torch.int64),
    target=np.empty(0, np.int64),
    read=np.zeros(1, np.int64),
)
"""A pass without targets, for a rank without rows that has to keep in step with others.

Two tokens, because compiled layers would be compiled again for one.
"""


def with_idle(micros: list[MicroBatch], passes: int) -> list[MicroBatch]:
    """Add idle passes, up to the number of the rank with the most."""
    return micros + [IDLE] * (passes - len(micros))


def learned(
    tokens: Ragged, mask: Ragged, *, apart: bool = False, native: int = ANY, readers: Ints | None = None
) -> Rows:
    """Return what training reads: each row with a learned token, up to the last such token.

    `native`: the longest row with the model's native positions. `readers`: as `Rows.reader`, of all rows of `tokens`.
    None: one reads all.
    """
    spans = np.flatnonzero(mask.values)
    row = np.repeat(np.arange(len(mask)), mask.lengths)[spans]
    rows, firsts = np.unique(row, return_index=True)
    lasts = np.append(firsts, len(row))[1:] - 1
    starts = tokens.offsets[rows]
    first = spans[firsts] - starts
    beyond = tokens.lengths[rows] > native
    own = _readers(readers, rows)
    return replace(_with_families(tokens, starts, spans[lasts] - starts, first, first, beyond, own), apart=apart)


def check_first(tokens: Ragged, mask: Ragged) -> None:
    """Raise DataError if a row's first token is learned, which nothing predicts."""
    starts = tokens.offsets[:-1][tokens.lengths > 0]
    values = np.asarray(mask.values, np.bool_)
    if values[starts].any():
        row = int(np.searchsorted(tokens.offsets, starts[values[starts]][0], side="right")) - 1
        raise DataError(
            f"`loss_mask` of row {row} is True at the first token, which nothing predicts: a row needs a token before "
            "the first that is learned"
        )


def whole(
    tokens: Ragged, mask: Ragged | None, *, apart: bool = False, native: int = ANY, readers: Ints | None = None
) -> Rows:
    """Return what scoring every token reads. If the mask marks prompts, each is read once for all its rows.

    `native` and `readers`: as in `learned`.
    """
    starts, lengths = tokens.offsets[:-1], tokens.lengths
    rows = np.flatnonzero(lengths > 1)
    starts, inputs = starts[rows], lengths[rows] - 1
    prompt = np.zeros(len(rows), np.int64)
    if mask is not None:
        spans = np.flatnonzero(mask.values)
        after = np.searchsorted(spans, starts)
        has_target = after < len(spans)
        first = spans[np.minimum(after, len(spans) - 1)] - starts if len(spans) else prompt
        prompt = np.where(has_target & (first <= inputs), first, 0)
    first, beyond = np.ones(len(rows), np.int64), inputs + 1 > native
    own = _readers(readers, rows)
    return replace(_with_families(tokens, starts, inputs, prompt, first, beyond, own), apart=apart)


def ends(tokens: Ragged, prompt: Ints, *, native: int = ANY) -> Rows:
    """Return what one number for each row reads. The last token only stands for that number and is not read.

    `prompt`, int64[rows]: tokens that a row has in common with its family. Empty rows are skipped. `native`: as in
    `learned`.
    """
    rows = np.flatnonzero(tokens.lengths)
    starts, inputs = tokens.offsets[rows], tokens.lengths[rows] - 1
    own = np.minimum(prompt[rows], inputs)
    return _with_families(tokens, starts, inputs, own, inputs, inputs > native, np.zeros_like(inputs))


def _readers(readers: Ints | None, rows: Ints) -> Ints:
    return np.zeros(len(rows), np.int64) if readers is None else readers[rows]


def _with_families(
    tokens: Ragged, starts: Ints, inputs: Ints, prompt: Ints, first: Ints, beyond: NDArray[np.bool_], reader: Ints
) -> Rows:
    names: dict[tuple[int, bytes], int] = {}
    values = tokens.values
    spans = zip(starts.tolist(), (starts + prompt).tolist(), strict=True)
    kinds = (2 * reader + beyond).tolist()
    keys = ((kind, values[start:end].tobytes()) for kind, (start, end) in zip(kinds, spans, strict=True))
    family = np.fromiter((names.setdefault(key, len(names)) for key in keys), np.int64, len(starts))
    alone = np.bincount(family, minlength=1)[family] == 1
    return Rows(starts, inputs, np.where(alone, 0, prompt), family, first, beyond, reader)


def micro_batches(
    tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int, *, repeats: bool = False
) -> Iterator[MicroBatch]:
    """Fill micro-batches of at most `budget` tokens. A longer row gets its own.

    With `repeats`, what rows share counts for each of them.

    Rows that begin alike stay together, and others are sorted by length, so that few shapes of attention are needed.
    """
    for part in _of_readers(rows, budget, lambda own: _packable(tokens, rows, own, budget, repeats)):
        yield packed(tokens, rows, part, learn)


def _of_readers(rows: Rows, budget: int, divide: Callable[[Ints], Iterator[Ints]]) -> Iterator[Ints]:
    """Yield the rows of micro-batches, divided for each reader as if it were alone.

    If they may be mixed, small ones of several readers are joined.
    """
    readers = np.unique(rows.reader)
    parts = [part for reader in readers for part in divide(np.flatnonzero(rows.reader == reader))]
    if not rows.mixed or len(readers) < 2:
        yield from parts
        return
    sizes = np.array([rows.inputs[part].sum() for part in parts])
    joined: list[Ints] = []
    filled = 0
    for number in np.argsort(sizes, kind="stable").tolist():
        if joined and filled + sizes[number] > budget:
            yield np.concatenate(joined)
            joined, filled = [], 0
        joined.append(parts[number])
        filled += sizes[number]
    yield np.concatenate(joined)


def _packable(tokens: Ragged, rows: Rows, own: Ints, budget: int, repeats: bool) -> Iterator[Ints]:
    """Divide some rows, by their numbers, into parts for one pass each."""
    places, shared = _alike(tokens, rows, own)
    order = own[places]
    prefix, family = rows.prefix[order], rows.family[order]
    tree = np.cumsum(shared == 0) - 1  # a row that shares nothing with the previous one starts a tree
    longest = np.zeros(len(order), np.int64)
    np.maximum.at(longest, tree, rows.inputs[order])
    # Rows of a family that share only their prompt do so in any order, so they are sorted by length.
    deep = np.zeros(len(order), np.bool_)
    np.logical_or.at(deep, tree, (shared > 0) & ((shared != prefix) | (np.diff(family, prepend=-1) != 0)))
    deep = deep[tree]
    within = np.where(deep, np.arange(len(order)), rows.inputs[order])
    places = np.lexsort((within, tree, longest[tree]))
    begins = np.diff(tree[places], prepend=-1) != 0
    shared = np.where(begins, 0, np.where(deep, shared, prefix)[places])
    yield from _filled(rows, order[places], np.zeros_like(shared) if repeats else shared, budget)


def _filled(rows: Rows, order: Ints, shared: Ints, budget: int) -> Iterator[Ints]:
    """Yield adjacent rows of this order. `shared`: tokens that each shares with those before it."""
    start = filled = 0
    inputs = rows.inputs[order]
    costs = inputs - shared + -(-np.maximum(shared - rows.prefix[order], 0) // _KEY)
    for index, (cost, alone) in enumerate(zip(costs.tolist(), inputs.tolist(), strict=True)):
        if index > start and filled + cost > budget:
            yield order[start:index]
            start = index
        filled = alone if index == start else filled + cost
    if start < len(order):
        yield order[start:]


def _alike(tokens: Ragged, rows: Rows, part: Ints) -> tuple[Ints, Ints]:
    """Sort rows, numbers of `part`, so that those that begin alike are adjacent, shorter ones first.

    Also returns how many tokens each, in this order, takes from those before it. A subset of the rows never increases
    it.
    """
    starts, inputs = rows.starts[part], rows.inputs[part]
    family = rows.family[part] if rows.apart else 2 * rows.reader[part] + rows.beyond[part]
    spans = [tokens.values[start : start + length] for start, length in zip(starts, inputs, strict=True)]
    keys = [(number, span.tobytes()) for number, span in zip(family.tolist(), spans, strict=True)]
    order = np.array(sorted(range(len(spans)), key=keys.__getitem__), np.int64)
    common = np.zeros(len(spans), np.int64)
    for place, (one, other) in enumerate(pairwise(order.tolist()), start=1):
        if family[one] != family[other]:
            continue
        size = min(len(spans[one]), len(spans[other]))
        differs = spans[one][:size] != spans[other][:size]
        common[place] = differs.argmax() if differs.any() else size
    prefix = rows.prefix[part][order]
    prefix = np.where(common >= prefix, prefix, 0)
    worth = (common - prefix >= _WORTH) & ((prefix > 0) | (common * _PARTS >= inputs[order])) & (not rows.apart)
    return order, np.where(worth, common, prefix)


def packed(tokens: Ragged, rows: Rows, part: Ints, learn: Ragged | None) -> MicroBatch:
    """Pack rows, numbers of `rows`, into one micro-batch. With `learn`, only learned targets are predicted."""
    starts, lengths, beyond = rows.starts[part], rows.inputs[part], rows.beyond[part]
    alike, shared = _alike(tokens, rows, part)
    before = np.zeros(len(part), np.int64)
    before[alike] = shared
    queries = lengths - before
    order = np.lexsort((lengths, queries))
    order = order[queries[order] > 0]
    packed_at = np.zeros(len(queries), np.int64)
    packed_at[order] = np.cumsum(queries[order]) - queries[order]

    # The packed token of each input of each row.
    offsets = np.cumsum(lengths) - lengths
    path = runs(packed_at - before, lengths)
    for one, other in pairwise(alike.tolist()):
        path[offsets[other] :][: before[other]] = path[offsets[one] :][: before[other]]

    read = runs((starts + before)[order], queries[order])
    keys = torch.from_numpy(path[runs(offsets[order], lengths[order])]) if before.any() else None
    source, target = _targets(rows, part, path, learn)
    return MicroBatch(
        ids=torch.from_numpy(tokens.values[read].astype(np.int64))[None],
        positions=torch.from_numpy(runs(before[order], queries[order]))[None],
        attend=Packed(groups_of(queries[order], lengths[order]), keys),
        source=torch.from_numpy(source),
        target=target,
        read=read,
        beyond=torch.from_numpy(np.repeat(beyond[order], queries[order]))[None] if beyond.any() else None,
    )


def padded_batches(tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
    """Fill micro-batches of at most `budget` tokens with padding, of rows of about one length. Nothing is shared."""
    for part in _of_readers(rows, budget, lambda own: _paddable(rows, own, budget)):
        yield padded(tokens, rows, part, learn)


def _paddable(rows: Rows, own: Ints, budget: int) -> Iterator[Ints]:
    order = own[np.argsort(rows.inputs[own], kind="stable")]
    start = 0
    for index, width in enumerate(np.maximum(2, rows.inputs[order]).tolist()):  # as `padded`
        if index > start and (index + 1 - start) * width > budget:
            yield order[start:index]
            start = index
    if start < len(order):
        yield order[start:]


def padded(tokens: Ragged, rows: Rows, part: Ints, learn: Ragged | None) -> MicroBatch:
    """Put each row, a number of `rows`, into its own sequence. Its last token is repeated, which no other sees."""
    inputs, beyond = rows.inputs[part], rows.beyond[part]
    width = max(2, int(inputs.max()))  # as IDLE
    place = np.broadcast_to(np.arange(width), (len(part), width))
    read = rows.starts[part][:, None] + np.minimum(place, np.maximum(inputs[:, None] - 1, 0))
    path = runs(np.arange(len(part)) * width, inputs)
    source, target = _targets(rows, part, path, learn)
    return MicroBatch(
        ids=torch.from_numpy(tokens.values[read].astype(np.int64)),
        positions=torch.from_numpy(place.copy()),
        attend=Packed(()),
        source=torch.from_numpy(source),
        target=target,
        read=read.ravel(),
        beyond=torch.from_numpy(np.broadcast_to(beyond[:, None], place.shape).copy()) if beyond.any() else None,
    )


def _targets(rows: Rows, part: Ints, path: Ints, learn: Ragged | None) -> tuple[Ints, Ints]:
    """Return the packed token that predicts, and the predicted token of the column, for each target of these rows.

    `path`: the packed token of each input of each row.
    """
    inputs, first = rows.inputs[part], rows.first[part]
    counts = inputs - first + 1
    source = path[runs(np.cumsum(inputs) - inputs + first - 1, counts)]
    target = runs(rows.starts[part] + first, counts)
    if learn is None:
        return source, target
    wanted = np.asarray(learn.values, np.bool_)[target]
    return source[wanted], target[wanted]


def groups_of(queries: Ints, keys: Ints) -> tuple[Group, ...]:
    """Group runs of equal shapes. Empty if there are no segments."""
    shapes = np.stack([queries, keys], 1)
    starts = np.flatnonzero((np.diff(shapes, axis=0, prepend=-1) != 0).any(1))
    counts = np.diff(starts, append=len(shapes)).tolist()
    return tuple(Group(count, *shape) for count, shape in zip(counts, shapes[starts].tolist(), strict=True))


def runs(starts: Ints, counts: Ints) -> Ints:
    """Concatenate `start, start + 1, ...` for each start, as many as its count."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + counts, counts)
