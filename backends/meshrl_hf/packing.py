"""Rows into micro-batches: one packed sequence each, no padding, and a shared prompt computed once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import Ragged
from meshrl.errors import DataError
from meshrl_hf.attention import Group, Packed
from meshrl_hf.devices import moved

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The rows to compute, and how much of each. All int64[rows], numbered as in the token column."""

    starts: Ints
    """The row's first token in the column."""
    inputs: Ints
    """How many of its tokens the model has to read: those before its last target."""
    prefix: Ints
    """How many of these it shares with the rows of its family, their prompt; 0 for a row without family."""
    family: Ints
    """Rows of one number share their prefix."""
    first: Ints
    """Its first target, a position in the row; targets run to position `inputs`."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed sequence of T tokens and the N tokens that it predicts. A token may be predicted once only."""

    ids: Tensor
    """int64[1, T]."""
    positions: Tensor
    """int64[1, T], restarting in each row."""
    attend: Packed
    source: Tensor
    """int64[N]: which packed token predicts."""
    target: Ints
    """int64[N]: what is predicted, a position in the batch's token column."""
    read: Ints
    """int64[T]: which token of that column each packed token is."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same, with its tensors on the device."""
        ids, positions, source = (moved(each, device) for each in (self.ids, self.positions, self.source))
        return replace(self, ids=ids, positions=positions, attend=self.attend.to(device), source=source)


Split: TypeAlias = Callable[[Ragged, Rows, Ragged | None, int], Iterator[MicroBatch]]
"""Divides rows of a token column into micro-batches of at most so many tokens, as `micro_batches` does."""

IDLE: Final = MicroBatch(
    ids=torch.zeros(1, 2, dtype=torch.int64),
    positions=torch.arange(2)[None],
    attend=Packed((Group(1, 2, 2),)),
    source=torch.empty(0, dtype=torch.int64),
    target=np.empty(0, np.int64),
    read=np.zeros(1, np.int64),
)
"""Nothing to predict: a pass that a rank without rows makes, so that it keeps in step with others.

Two tokens: compiled layers that were compiled for any number of them would be compiled again for one.
"""


def learned(tokens: Ragged, mask: Ragged) -> Rows:
    """What a training pass needs: up to the last learned token of each row that has one."""
    spans = np.flatnonzero(mask.values)
    row = np.repeat(np.arange(len(mask)), mask.lengths)[spans]
    rows, firsts = np.unique(row, return_index=True)
    lasts = np.append(firsts, len(row))[1:] - 1
    starts = tokens.offsets[rows]
    first = spans[firsts] - starts
    return _with_families(tokens, starts, spans[lasts] - starts, first, first)


def check_first(tokens: Ragged, mask: Ragged) -> None:
    """DataError where a row's first token is learned, which nothing predicts."""
    starts = tokens.offsets[:-1][tokens.lengths > 0]
    values = np.asarray(mask.values, np.bool_)
    if values[starts].any():
        row = int(np.searchsorted(tokens.offsets, starts[values[starts]][0], side="right")) - 1
        raise DataError(
            f"`loss_mask` of row {row} is True at the first token, which nothing predicts: a row needs a token before "
            "the first that is learned"
        )


def whole(tokens: Ragged, mask: Ragged | None) -> Rows:
    """What scoring every token needs; a prompt, where the mask tells it, is read once for all its rows."""
    starts, lengths = tokens.offsets[:-1], tokens.lengths
    rows = np.flatnonzero(lengths > 1)
    starts, inputs = starts[rows], lengths[rows] - 1
    prompt = np.zeros(len(rows), np.int64)
    if mask is not None:
        spans = np.flatnonzero(mask.values)
        after = np.searchsorted(spans, starts)
        found = after < len(spans)
        first = spans[np.minimum(after, len(spans) - 1)] - starts if len(spans) else prompt
        prompt = np.where(found & (first <= inputs), first, 0)
    return _with_families(tokens, starts, inputs, prompt, np.ones(len(rows), np.int64))


def ends(tokens: Ragged, prompt: Ints) -> Rows:
    """What one number of each row needs, where its last token stands for that number and is not read.

    `prompt`, int64[rows]: how many tokens a row has in common with the others of its family. Empty rows are left out.
    """
    rows = np.flatnonzero(tokens.lengths)
    starts, inputs = tokens.offsets[rows], tokens.lengths[rows] - 1
    return _with_families(tokens, starts, inputs, np.minimum(prompt[rows], inputs), inputs)


def _with_families(tokens: Ragged, starts: Ints, inputs: Ints, prompt: Ints, first: Ints) -> Rows:
    names: dict[bytes, int] = {}
    values = tokens.values
    spans = zip(starts.tolist(), (starts + prompt).tolist(), strict=True)
    keys = (values[start:end].tobytes() for start, end in spans)
    family = np.fromiter((names.setdefault(key, len(names)) for key in keys), np.int64, len(starts))
    alone = np.bincount(family, minlength=1)[family] == 1
    return Rows(starts, inputs, np.where(alone, 0, prompt), family, first)


def micro_batches(tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
    """Fill micro-batches of at most `budget` tokens; a row longer than that has one of its own.

    Families stay together and rows of about one length meet, so that few shapes of attention are needed.
    """
    longest = np.zeros(int(rows.family.max(initial=-1)) + 1, np.int64)
    np.maximum.at(longest, rows.family, rows.inputs)
    order = np.lexsort((rows.inputs, rows.family, longest[rows.family]))
    for part in _filled(rows, order, budget):
        yield packed(tokens, rows, part, learn)


def _filled(rows: Rows, order: Ints, budget: int) -> Iterator[Ints]:
    start = filled = 0
    family = -1
    own = (rows.inputs - rows.prefix)[order].tolist()
    prefix, families = rows.prefix[order].tolist(), rows.family[order].tolist()
    for index, tokens in enumerate(own):
        cost = tokens + (prefix[index] if families[index] != family else 0)
        if index > start and filled + cost > budget:
            yield order[start:index]
            start, filled, cost = index, 0, tokens + prefix[index]
        filled += cost
        family = families[index]
    if start < len(own):
        yield order[start:]


def packed(tokens: Ragged, rows: Rows, part: Ints, learn: Ragged | None) -> MicroBatch:
    """One micro-batch of these rows, numbers of `rows`; of their targets those that are learned, where that is told."""
    starts, inputs, prefix = rows.starts[part], rows.inputs[part], rows.prefix[part]
    _, leaders, family = np.unique(rows.family[part], return_index=True, return_inverse=True)
    sharing = prefix > 0
    heads = leaders[sharing[leaders]]  # one row of each family stands for the family's prompt
    own = inputs - prefix
    # The segments: first the shared prompts, then what each row has of its own.
    begin = np.concatenate([starts[heads], starts + prefix])
    queries = np.concatenate([prefix[heads], own])
    before = np.concatenate([np.zeros(len(heads), np.int64), prefix])
    order = np.lexsort((before + queries, queries))
    order = order[queries[order] > 0]
    packed_at = np.zeros(len(queries), np.int64)
    packed_at[order] = np.cumsum(queries[order]) - queries[order]

    prompt_of_family = np.zeros(len(leaders), np.int64)
    prompt_of_family[family[heads]] = packed_at[: len(heads)]
    own_at = packed_at[len(heads) :]
    prompt_at = np.where(sharing, prompt_of_family[family], own_at)

    read = runs(begin[order], queries[order])
    positions = runs(before[order], queries[order])
    keys = None
    if sharing.any():
        seen = np.stack([np.concatenate([packed_at[: len(heads)], prompt_at]), packed_at], axis=1)[order]
        counts = np.stack([before, queries], axis=1)[order]
        keys = torch.from_numpy(runs(seen.reshape(-1), counts.reshape(-1)))

    source, target = _targets(rows, part, own_at, prompt_at, learn)
    return MicroBatch(
        ids=torch.from_numpy(tokens.values[read].astype(np.int64))[None],
        positions=torch.from_numpy(positions)[None],
        attend=Packed(groups_of(queries[order], (before + queries)[order]), keys),
        source=torch.from_numpy(source),
        target=target,
        read=read,
    )


def _targets(rows: Rows, part: Ints, own_at: Ints, prompt_at: Ints, learn: Ragged | None) -> tuple[Ints, Ints]:
    """Which packed token predicts which token of the column, over the targets of these rows."""
    starts, inputs, prefix, first = rows.starts[part], rows.inputs[part], rows.prefix[part], rows.first[part]
    counts = inputs - first + 1
    row = np.repeat(np.arange(len(part)), counts)
    reader = runs(first - 1, counts)  # the position, in the row, of the token that predicts
    shared = reader < prefix[row]
    source = reader + np.where(shared, prompt_at[row], own_at[row] - prefix[row])
    target = reader + 1 + starts[row]
    if learn is None:
        return source, target
    kept = np.asarray(learn.values, np.bool_)[target]
    return source[kept], target[kept]


def groups_of(queries: Ints, keys: Ints) -> tuple[Group, ...]:
    """Runs of equal shapes; none of no segments."""
    if not len(queries):
        return ()
    changes = np.flatnonzero((np.diff(queries) != 0) | (np.diff(keys) != 0)) + 1
    bounds = [0, *changes.tolist(), len(queries)]
    shapes: Sequence[tuple[int, int]] = list(
        zip(queries[bounds[:-1]].tolist(), keys[bounds[:-1]].tolist(), strict=True)
    )
    counts = np.diff(bounds).tolist()
    return tuple(Group(count, *shape) for count, shape in zip(counts, shapes, strict=True))


def runs(starts: Ints, counts: Ints) -> Ints:
    """`start, start + 1, ...` for each start, as many as its count, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + counts, counts)
