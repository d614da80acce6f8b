"""One optimizer step of a whole batch, for the policy and the critic alike."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.losses import Loss, token_weights
from meshrl.metrics import Metrics
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.packing import MicroBatch, learned, micro_batches
from meshrl_hf.scoring import spread

Predict: TypeAlias = Callable[[Batch, MicroBatch], Tensor]
"""What a model says of each target of a micro-batch, float32[targets] with a gradient: log-probs, or values."""


_OWN: Final = frozenset({"loss", "grad_norm", "lr", "rows", "tokens"})
"""The metrics of the step itself."""


async def step(optimizer: Optimizer, predict: Predict, batch: Batch, loss: Loss, budget: int) -> Metrics:
    """One step on the batch, in micro-batches of at most `budget` tokens; it may be cancelled between two of them.

    Then, and where it raises, no weight has changed. DataError if there is nothing to learn or the loss names a metric
    as the step does, ModelError if the gradient is not finite.
    """
    tokens, mask = batch.tokens, batch.loss_mask
    rows, count = learnable(tokens, mask)
    weights = token_weights(mask, loss.normalise, tokens=count, rows=rows, constant=loss.constant)
    optimizer.forget()  # what an update left behind that failed half-way
    total = 0.0
    sums: dict[str, float] = {}
    for micro in micro_batches(tokens, learned(tokens, mask), mask, budget):
        predicted = predict(batch, micro)
        columns = {name: spread(batch, name, micro.target) for name in loss.columns}
        judged = loss(predicted, columns)
        _check_names(loss, judged.metrics)
        value = judged.values @ torch.from_numpy(weights[micro.target])
        value.backward()
        total += value.item()
        for name, metric in judged.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(metric.sum())
        await asyncio.sleep(0)  # here a cancelled call ends
    rate = optimizer.lr
    norm = optimizer.step()
    own = Metrics.of(
        loss=(total, 1),
        grad_norm=(norm, 1),
        lr=(rate, 1),
        rows=(len(batch), 1),
        tokens=(len(tokens.values), 1),
    )
    return own | Metrics({name: (value, count) for name, value in sums.items()})


def _check_names(loss: Loss, metrics: Iterable[str]) -> None:
    """DataError where a loss tells what the step tells: before it, so that who tries again does not learn twice."""
    if taken := sorted(_OWN.intersection(metrics)):
        raise DataError(
            f"{type(loss).__name__} names a metric `{'`, `'.join(taken)}`, which every update tells of itself: give it "
            f"another name than {', '.join(sorted(_OWN))}"
        )


def learnable(tokens: Ragged, mask: Ragged) -> tuple[int, int]:
    """How many rows have a learned token, and how many such tokens there are; DataError if there is none."""
    check_first(tokens, mask)
    starts = tokens.offsets[:-1][tokens.lengths > 0]
    values = np.asarray(mask.values, np.bool_)
    count = int(values.sum())
    if count == 0:
        raise DataError(
            f"nothing to learn: `loss_mask` is False for all {len(values)} tokens of {len(mask)} rows; "
            "leave such a batch out"
        )
    return int(np.add.reduceat(values, starts).astype(bool).sum()), count


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
