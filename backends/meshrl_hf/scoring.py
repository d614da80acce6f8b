"""Log-probabilities of given tokens, for the policy and the reference alike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import Batch, Ragged, Source
from meshrl.losses import spread
from meshrl_hf.devices import moved
from meshrl_hf.model import LanguageModel
from meshrl_hf.packing import MicroBatch, Rows, Split, micro_batches, whole
from meshrl_hf.ranks import SINGLE_RANK, RankGroup, Share
from meshrl_hf.routing import COLUMN, followed

Predict: TypeAlias = Callable[[Batch, MicroBatch], Tensor]
"""What a model says of each target of a micro-batch, float32[targets]: log-probs, or values.

Where gradients are kept, log-probs have entropies beside them, float32[targets, 2]."""
PredictAll: TypeAlias = Callable[[Batch, list[MicroBatch]], Iterator[Tensor]]
"""The same of micro-batches in their order, which a pipeline may compute together."""
Values: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Passes:
    """How a role's ranks run its model over a batch."""

    model: LanguageModel
    predict: PredictAll
    budget: int
    """Tokens of a micro-batch, at most."""
    ranks: RankGroup = SINGLE_RANK
    split: Split = micro_batches


def one_by_one(predict: Predict) -> PredictAll:
    """Each micro-batch when it is asked for."""
    return lambda batch, micros: (predict(batch, micro) for micro in micros)


def predicted(model: LanguageModel, batch: Batch, micro: MicroBatch, *, follows: bool = False) -> Tensor:
    """What `LanguageModel.logprobs` gives of each target of a micro-batch.

    Logits are divided by the batch's `temperature` where it has one. `follows`: tokens go to the experts that the batch
    tells, where it tells some.
    """
    there = micro.to(model.device)
    routes = followed(batch, micro, model.device) if follows else None
    hidden = model.hidden(there.ids, there.positions, there.attend, routes)[0].index_select(0, there.source)
    tokens = moved(torch.from_numpy(batch.tokens.values[micro.target].astype(np.int64)), model.device)
    return model.logprobs(hidden, tokens, temperatures(batch, micro.target, model.device))


def temperatures(batch: Batch, target: NDArray[np.int64], device: torch.device) -> Tensor | None:
    """The temperature of the row of each of these tokens, float32[target]; None where the batch has none."""
    return moved(torch.from_numpy(spread(batch, "temperature", target)), device) if "temperature" in batch else None


def check_readable(model: LanguageModel, batch: Batch) -> None:
    """DataError where `predicted` cannot take a batch."""
    model.check_rows(batch)
    if "temperature" in batch:
        spread(batch, "temperature", np.empty(0, np.int64))


@torch.no_grad()
def score(passes: Passes, batch: Batch, rows: Callable[[], Rows], learn: Ragged | None) -> Values:
    """What a model says of each target of the rows, float32[tokens of the batch]; 0 for the other tokens.

    `rows`, called once, raises where this rank's rows do not fit; then all ranks raise. Each rank makes as many passes.
    """
    micros: list[MicroBatch] = []

    def share() -> Share:
        micros.extend(passes.split(batch.tokens, rows(), learn, passes.budget))
        return Share(len(micros))

    values = np.zeros(len(batch.tokens.values), np.float32)
    padded = passes.ranks.total(share).padded(micros)
    for micro, said in zip(padded, passes.predict(batch, padded), strict=True):
        values[micro.target] = said.cpu().numpy()
    return values


def logprobs(
    passes: Passes, batch: Batch, source: Source, check: Callable[[LanguageModel, Batch], object] = check_readable
) -> Ragged:
    """The log-probability of each token of `tokens`, ragged float32, by the source; 0 for the first of a row.

    `check` raises where this rank's rows do not fit the model.
    """
    tokens = batch.tokens
    mask = batch.loss_mask if "loss_mask" in batch else None

    def rows() -> Rows:
        check(passes.model, batch)
        return whole(tokens, mask, apart=COLUMN in batch)

    return Ragged(score(passes, batch, rows, None), tokens.offsets, source=source)
