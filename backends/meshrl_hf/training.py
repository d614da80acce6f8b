"""One optimizer step of a whole batch, for the policy and the critic alike."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import Batch, Metrics, Ragged, check_lengths
from meshrl.errors import DataError
from meshrl.losses import Loss, Predicts, spread, token_weights
from meshrl_hf.devices import moved
from meshrl_hf.packing import IDLE, MicroBatch, check_first, learned
from meshrl_hf.ranks import RankGroup, Share
from meshrl_hf.routing import COLUMN
from meshrl_hf.scoring import Passes, Predict

_OWN: Final = frozenset({"loss", "grad_norm", "lr", "rows", "tokens", "entropy"})
"""The metrics of the step itself."""


class Steps(Protocol):
    """What a step needs of an optimizer."""

    steps: int
    """Made so far."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        ...

    def step(self, predicts: Predicts) -> float:
        """Step, and forget the gradients; their norm before clipping. ModelError, and no step, if it is not finite.

        `predicts`: what the model does, for the message.
        """
        ...

    def forget(self) -> None:
        """Drop the gradients."""
        ...


async def step(
    optimizer: Steps,
    passes: Passes,
    predict: Predict,
    batch: Batch,
    loss: Loss,
    check: Callable[[], object],
    begin: Callable[[bool], None] = lambda _: None,
) -> Metrics:
    """One step on the rows of all ranks, pass by pass, as many on each rank; `predict` keeps what gradients need.

    `begin` is told before each pass whether it is the last. `check` raises where this rank's rows do not fit. Where
    peers allow it, the step may be cancelled between two micro-batches. Then, and where it raises, no weight has
    changed. DataError if there is nothing to learn or the loss names a metric as the step does, ModelError if the
    gradient is not finite.
    """
    peers = passes.ranks
    ready = prepared(passes, batch, loss, check)
    optimizer.forget()  # what an update left behind that failed half-way
    for left, micro in zip(reversed(range(len(ready.micros))), ready.micros, strict=True):
        begin(left == 0)
        ready.judge(predict(batch, micro), micro, peers).backward()
        if peers.interruptible:
            await asyncio.sleep(0)  # here a cancelled call ends
    told = peers.agree(ready.judge.told)[peers.number]
    return stepped(optimizer, loss.predicts, told, batch, peers)


@dataclass(frozen=True)
class Prepared:
    """A step whose gradients are yet to be computed."""

    judge: "Judge"
    micros: list[MicroBatch]
    """As many on each rank."""


def prepared(passes: Passes, batch: Batch, loss: Loss, check: Callable[[], object]) -> Prepared:
    """What `step` computes: micro-batches, and the loss that weighs them together.

    DataError, on all ranks, if there is nothing to learn; what `check` raises on one rank, all raise.
    """
    tokens, mask = batch.tokens, batch.loss_mask
    micros: list[MicroBatch] = []

    def share() -> Share:
        check()
        _check_logprobs(batch, loss)
        rows, count = learnable(tokens, mask)
        if count:
            micros.extend(passes.split(tokens, learned(tokens, mask, apart=COLUMN in batch), mask, passes.budget))
        return Share(len(micros), count, rows)

    total = passes.ranks.total(share)
    if not total.tokens:
        raise DataError(
            f"nothing to learn: `loss_mask` is False for all {len(mask.values)} tokens of {len(mask)} rows"
            f"{', and on the other ranks' if passes.ranks.size > 1 else ''}; leave such a batch out"
        )
    weights = token_weights(mask, loss.normalise, tokens=total.tokens, rows=total.rows, constant=loss.constant)
    return Prepared(Judge(batch, loss, weights), total.padded(micros))


class Judge:
    """The loss of one step, micro-batch by micro-batch. Its sums stay on the device until `told` reads them."""

    def __init__(self, batch: Batch, loss: Loss, weights: NDArray[np.float32]) -> None:
        self._batch, self._loss, self._weights = batch, loss, weights
        self._sums: dict[str, Tensor] = {}
        """float64[] each, on the device: of `loss`, and of each metric by its name."""
        self._failure: Exception | None = None

    def __call__(self, predicted: Tensor, micro: MicroBatch, peers: RankGroup) -> Tensor:
        """The micro-batch's part of the loss, float32[].

        Where the loss raises and other ranks would wait for this one, it goes on with zeros, and `told` raises.
        """
        if micro is not IDLE and self._failure is None:
            try:
                return self._judged(predicted, micro)
            except Exception as error:
                if peers.interruptible:
                    raise
                self._failure = error
        return predicted.sum() * 0

    def told(self) -> Mapping[str, float]:
        """The sums of `loss` and of its metrics, once all is computed. Raises what the loss has raised."""
        if self._failure is not None:
            raise self._failure
        if not self._sums:  # each micro-batch was idle
            return {}
        return dict(zip(self._sums, cast("list[float]", torch.stack([*self._sums.values()]).tolist()), strict=True))

    def _judged(self, predicted: Tensor, micro: MicroBatch) -> Tensor:
        logprobs, entropy = predicted.unbind(1) if predicted.dim() > 1 else (predicted, None)
        device = predicted.device
        columns = {name: torch.from_numpy(spread(self._batch, name, micro.target)) for name in self._loss.columns}
        judged = self._loss(logprobs, {name: moved(column, device) for name, column in columns.items()})
        _check_names(self._loss, judged.metrics)
        part = judged.values @ moved(torch.from_numpy(self._weights[micro.target]), device)
        own = {} if entropy is None else {"entropy": entropy}
        for name, metric in {"loss": part, **judged.metrics, **own}.items():
            before = self._sums.get(name, part.new_zeros((), dtype=torch.float64))
            self._sums[name] = before + metric.detach().sum()
        return part


def stepped(optimizer: Steps, predicts: Predicts, told: Mapping[str, float], batch: Batch, peers: RankGroup) -> Metrics:
    """Make the step, from the gradients of all micro-batches and what the judge has told.

    Its metrics become the whole batch's where those of all ranks with rows of their own are averaged.
    """
    ranks = peers.size
    rate = optimizer.lr
    norm = optimizer.step(predicts)
    own = Metrics.of(
        loss=(told.get("loss", 0.0), 1 / ranks),
        grad_norm=(norm / ranks, 1 / ranks),
        lr=(rate / ranks, 1 / ranks),
        rows=(len(batch), 1 / ranks),
        tokens=(len(batch.tokens.values), 1 / ranks),
    )
    learned_tokens = int(np.count_nonzero(batch.loss_mask.values))
    return own | Metrics({name: (total, learned_tokens) for name, total in told.items() if name != "loss"})


def _check_logprobs(batch: Batch, loss: Loss) -> None:
    """DataError where log-probs of learned tokens are not finite, which no gradient survives."""
    for name in loss.columns:
        if name.endswith("logprobs") and name in batch and isinstance(column := batch[name], Ragged):
            if column.offsets is not batch.tokens.offsets:
                check_lengths(name, column.lengths, batch.tokens.lengths)
            bad = np.flatnonzero(~np.isfinite(column.values) & np.asarray(batch.loss_mask.values, np.bool_))
            if len(bad):
                row = int(np.searchsorted(column.offsets, bad[0], side="right")) - 1
                raise DataError(
                    f"`{name}` is not finite at {len(bad)} learned tokens, the first in row {row}, token "
                    f"{bad[0] - column.offsets[row]}: leave such rows out with batch.select"
                )


def _check_names(loss: Loss, metrics: Iterable[str]) -> None:
    """DataError where a loss tells what the step tells: before it, so that who tries again does not learn twice."""
    if taken := sorted(_OWN.intersection(metrics)):
        raise DataError(
            f"{type(loss).__name__} names a metric `{'`, `'.join(taken)}`, which every update reports: choose a name "
            f"other than {', '.join(sorted(_OWN))}"
        )


def learnable(tokens: Ragged, mask: Ragged) -> tuple[int, int]:
    """How many rows have a learned token, and how many such tokens there are."""
    check_first(tokens, mask)
    starts = tokens.offsets[:-1][tokens.lengths > 0]
    values = np.asarray(mask.values, np.bool_)
    rows = int(np.add.reduceat(values, starts).astype(bool).sum()) if len(starts) else 0
    return rows, int(values.sum())
