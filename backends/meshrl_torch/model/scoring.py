"""Log-probabilities of given tokens, for the policy and the reference alike."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.algo import spread
from meshrl.data import BASE, DEFAULT_ADAPTER, MASKED, Batch, Ragged, Source, adapters_of, check_lengths, masked_spans
from meshrl.errors import DataError
from meshrl_torch.model.adapted import Uses
from meshrl_torch.model.attention import moved
from meshrl_torch.model.masks import check_masked, masks
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import IDLE, MicroBatch, Rows, Split, micro_batches, whole, with_idle
from meshrl_torch.model.routing import COLUMN, Routes, followed
from meshrl_torch.ranks.process_group import SINGLE_RANK, RankGroup, Share

Predict: TypeAlias = Callable[[Batch, MicroBatch], Tensor]
"""The prediction for each target of a micro-batch, float32[targets]: log-probs, or values.

If gradients are kept, log-probs come with entropies, float32[targets, 2].
"""
PredictAll: TypeAlias = Callable[[Batch, list[MicroBatch]], Iterator[Tensor]]
"""The same for micro-batches in order, which a pipeline may compute together."""
Values: TypeAlias = NDArray[np.float32]
TARGETS: Final = "targets"
"""The column of the tokens whose log-probs are asked for, if they are not the row's own. Ragged int32."""


@dataclass(frozen=True)
class Passes:
    """Runs a role's model over a batch, on all its ranks."""

    model: LanguageModel
    predict: PredictAll
    budget: int
    """Most tokens of a micro-batch."""
    ranks: RankGroup = SINGLE_RANK
    split: Split = micro_batches


def one_by_one(predict: Predict) -> PredictAll:
    """Compute each micro-batch when it is requested."""
    return lambda batch, micros: (predict(batch, micro) for micro in micros)


def states(
    model: LanguageModel, batch: Batch, micro: MicroBatch, routes: Routes | None = None, uses: Uses | None = None
) -> Tensor:
    """Return the hidden states that predict the targets of a batch's micro-batch, [targets, hidden]."""
    images = None if micro is IDLE else model.seen(batch, micro)
    placed = micro.to(model.device)
    hidden = model.hidden(placed.ids, placed.positions, placed.attend, routes, placed.beyond, uses, images)
    return hidden.flatten(0, 1).index_select(0, placed.source)


def used(model: LanguageModel, batch: Batch, micro: MicroBatch) -> Uses | None:
    """Return the adapters of a micro-batch's tokens. An idle pass reads one of the batch's, or any other."""
    if model.adapters is None:
        return None
    names = np.array(adapters_of(batch, model.adapters.named), np.str_)
    if micro is IDLE:
        names = names if len(names) else np.array([*model.adapters.named, BASE], np.str_)
        return Uses.of(names[:1], model.device)
    rows = np.searchsorted(batch.tokens.offsets, micro.read, side="right") - 1
    return Uses.of(names[rows], model.device, micro.source.numpy())


def predicted(model: LanguageModel, batch: Batch, micro: MicroBatch, *, follows: bool = False) -> Tensor:
    """Return `LanguageModel.logprobs` for each target of a micro-batch.

    The targets are the batch's `targets`, if it has them, in place of its tokens. Logits are divided by the batch's
    `temperature` if it has one, and masked where its `masked` says so. `follows`: tokens are routed to the experts in
    the batch, if it has some.
    """
    routes = followed(batch, micro, model.device) if follows else None
    hidden = states(model, batch, micro, routes, used(model, batch, micro))
    named = batch.ragged(TARGETS) if TARGETS in batch else batch.tokens
    tokens = moved(torch.from_numpy(named.values[micro.target].astype(np.int64)), model.device)
    allowed = masks(model, batch, micro.target)
    allowed = None if allowed is None else moved(allowed, model.device)
    return model.logprobs(hidden, tokens, temperatures(batch, micro.target, model.device), allowed)


def temperatures(batch: Batch, target: NDArray[np.int64], device: torch.device) -> Tensor | None:
    """The temperature of the row of each of these tokens, float32[target]. None if the batch has none."""
    return moved(torch.from_numpy(spread(batch, "temperature", target)), device) if "temperature" in batch else None


def check_readable(model: LanguageModel, batch: Batch) -> None:
    """Raise DataError if `predicted` cannot read a batch."""
    model.check_rows(batch)
    if TARGETS in batch:
        if any(masked_spans(batch)):
            raise DataError(f"`{TARGETS}` and `{MASKED}` are both in a batch: masks are those of the rows' own tokens")
        model.check_rows(Batch.of(tokens=batch.ragged(TARGETS)))
        check_lengths(TARGETS, batch.ragged(TARGETS).lengths, batch.tokens.lengths)
    check_masked(model, batch)
    if "temperature" in batch:
        spread(batch, "temperature", np.empty(0, np.int64))


class Readers(NamedTuple):
    """The adapters that read the rows of a batch."""

    names: Sequence[str]
    """`DEFAULT_ADAPTER` alone if the model has none."""
    rows: NDArray[np.int64]
    """The number of each row's adapter, int64[rows]."""


def readers(model: LanguageModel, batch: Batch) -> Readers:
    """Return the adapters of a batch's rows. DataError if a row names an unknown one."""
    if model.adapters is None:
        return Readers([DEFAULT_ADAPTER], np.zeros(len(batch), np.int64))
    names, rows = np.unique(np.array(adapters_of(batch, model.adapters.named), np.str_), return_inverse=True)
    return Readers(names.tolist(), rows.astype(np.int64))


@torch.no_grad()
def score(passes: Passes, batch: Batch, rows: Callable[[], Rows], learn: Ragged | None) -> Values:
    """Return the model's prediction for each target, float32[tokens of the batch]. Other tokens get 0.

    `rows`, called once, raises on all ranks if a rank's rows do not fit. All ranks make the same number of passes.
    """
    micros: list[MicroBatch] = []

    def share() -> Share:
        micros.extend(passes.split(batch.tokens, rows(), learn, passes.budget))
        return Share(len(micros))

    values = np.zeros(len(batch.tokens.values), np.float32)
    padded = with_idle(micros, passes.ranks.total(share).passes)
    for micro, output in zip(padded, passes.predict(batch, padded), strict=True):
        values[micro.target] = output.cpu().numpy()
    return values


def logprobs(
    passes: Passes,
    batch: Batch,
    source: Source | None,
    check: Callable[[LanguageModel, Batch], object] = check_readable,
) -> Ragged:
    """Return the log-probability of each token of `tokens`, ragged float32 with this source. 0 for a row's first token.

    `check` raises if this rank's rows do not fit the model.
    """
    tokens = batch.tokens
    mask = batch.loss_mask if "loss_mask" in batch else None

    def rows() -> Rows:
        check(passes.model, batch)
        own = readers(passes.model, batch)
        return whole(tokens, mask, apart=COLUMN in batch, native=passes.model.native_tokens, readers=own.rows)

    return Ragged(score(passes, batch, rows, None), tokens.offsets, source=source)


def most_probable(model: LanguageModel, batch: Batch, top: int, budget: int, split: Split) -> tuple[Ragged, Ragged]:
    """Return the `top` most probable tokens at each place of `tokens`, and their log-probs, with 0 at a row's first.

    Ragged int32[tokens, top] and float32[tokens, top].
    """
    tokens, own = batch.tokens, readers(model, batch)
    rows = whole(tokens, None, native=model.native_tokens, readers=own.rows)
    ids = np.zeros((len(tokens.values), top), np.int32)
    logprobs = np.zeros((len(tokens.values), top), np.float32)
    with torch.no_grad():
        for micro in split(tokens, rows, None, budget):
            hidden = states(model, batch, micro, uses=used(model, batch, micro))
            best = model.logits(hidden).log_softmax(-1).topk(top, -1)
            ids[micro.target] = best.indices.cpu().numpy()
            logprobs[micro.target] = best.values.cpu().numpy()
    return Ragged(ids, tokens.offsets), Ragged(logprobs, tokens.offsets)
