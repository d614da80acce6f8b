"""One optimizer step of a whole batch, for the policy and the critic alike."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import torch

from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.losses import Loss, token_weights
from meshrl.metrics import Metrics
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.packing import IDLE, MicroBatch, check_first, learned, micro_batches
from meshrl_hf.peers import ALONE, Peers, Share
from meshrl_hf.scoring import Predict, spread

_OWN: Final = frozenset({"loss", "grad_norm", "lr", "rows", "tokens"})
"""The metrics of the step itself."""


async def step(
    optimizer: Optimizer,
    predict: Predict,
    batch: Batch,
    loss: Loss,
    budget: int,
    check: Callable[[], object],
    peers: Peers = ALONE,
) -> Metrics:
    """One step on the rows of all ranks, in micro-batches of at most `budget` tokens, as many on each rank.

    `check` raises where this rank's rows do not fit. Where peers allow it, the step may be cancelled between two
    micro-batches. Then, and where it raises, no weight has changed. DataError if there is nothing to learn or the loss
    names a metric as the step does, ModelError if the gradient is not finite.
    """
    tokens, mask = batch.tokens, batch.loss_mask
    micros: list[MicroBatch] = []

    def share() -> Share:
        check()
        rows, count = learnable(tokens, mask)
        if count:
            micros.extend(micro_batches(tokens, learned(tokens, mask), mask, budget))
        return Share(len(micros), count, rows)

    total = peers.total(share)
    if not total.tokens:
        raise DataError(
            f"nothing to learn: `loss_mask` is False for all {len(mask.values)} tokens of {len(mask)} rows"
            f"{', and on the other ranks' if peers.size > 1 else ''}; leave such a batch out"
        )
    weights = token_weights(mask, loss.normalise, tokens=total.tokens, rows=total.rows, constant=loss.constant)
    optimizer.forget()  # what an update left behind that failed half-way
    value = 0.0
    sums: dict[str, float] = {}
    for micro in total.padded(micros):
        predicted = predict(batch, micro)
        if micro is IDLE:  # no loss need know what to do with no tokens
            (predicted.sum() * 0).backward()
            continue
        columns = {name: spread(batch, name, micro.target).to(predicted.device) for name in loss.columns}
        judged = loss(predicted, columns)
        _check_names(loss, judged.metrics)
        part = judged.values @ torch.from_numpy(weights[micro.target]).to(predicted.device)
        part.backward()
        value += part.item()
        for name, metric in judged.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(metric.sum())
        if peers.interruptible:
            await asyncio.sleep(0)  # here a cancelled call ends
    return _told(optimizer, value, sums, batch, peers.size)


def _told(optimizer: Optimizer, loss: float, sums: Mapping[str, float], batch: Batch, ranks: int) -> Metrics:
    """Make the step; its metrics, which become the whole batch's where those of all ranks are averaged."""
    rate = optimizer.lr
    norm = optimizer.step()
    own = Metrics.of(
        loss=(loss, 1 / ranks),
        grad_norm=(norm / ranks, 1 / ranks),
        lr=(rate / ranks, 1 / ranks),
        rows=(len(batch), 1 / ranks),
        tokens=(len(batch.tokens.values), 1 / ranks),
    )
    learned_tokens = int(np.count_nonzero(batch.loss_mask.values))
    return own | Metrics({name: (total, learned_tokens) for name, total in sums.items()})


def _check_names(loss: Loss, metrics: Iterable[str]) -> None:
    """DataError where a loss tells what the step tells: before it, so that who tries again does not learn twice."""
    if taken := sorted(_OWN.intersection(metrics)):
        raise DataError(
            f"{type(loss).__name__} names a metric `{'`, `'.join(taken)}`, which every update tells of itself: give it "
            f"another name than {', '.join(sorted(_OWN))}"
        )


def learnable(tokens: Ragged, mask: Ragged) -> tuple[int, int]:
    """How many rows have a learned token, and how many such tokens there are."""
    check_first(tokens, mask)
    starts = tokens.offsets[:-1][tokens.lengths > 0]
    values = np.asarray(mask.values, np.bool_)
    rows = int(np.add.reduceat(values, starts).astype(bool).sum()) if len(starts) else 0
    return rows, int(values.sum())
