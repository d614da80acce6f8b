"""One optimizer step on a whole batch, for all trained roles."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.algo import Loss, Predicts, spread, token_weights
from meshrl.data import Batch, Metrics, Ragged, check_lengths, why_unknown
from meshrl.errors import DataError
from meshrl_torch.model.attention import moved
from meshrl_torch.model.packing import IDLE, MicroBatch, check_first, learned, with_idle
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.scoring import Passes
from meshrl_torch.ranks.process_group import RankGroup, Share
from meshrl_torch.train.optimizer import Stepper

_OWN: Final = frozenset({"loss", "grad_norm", "lr", "rows", "tokens", "entropy"})
"""The metrics of the step itself."""


def prepared(
    passes: Passes, batch: Batch, loss: Loss, check: Callable[[], object]
) -> tuple[list[MicroBatch], "StepLoss"]:
    """Prepare a step: micro-batches, the same number on each rank, and the loss that weighs them together.

    DataError on all ranks if there is nothing to learn. An error of `check` on one rank is raised on all.
    """
    tokens, mask = batch.tokens, batch.loss_mask
    micros: list[MicroBatch] = []

    def share() -> Share:
        check()
        _check_logprobs(batch, loss)
        check_first(tokens, mask)
        native = passes.model.native_tokens + (loss.predicts == "scores")  # such rows have one more token
        rows = learned(tokens, mask, apart=COLUMN in batch, native=native)
        micros.extend(passes.split(tokens, rows, mask, passes.budget))
        return Share(len(micros), int(np.count_nonzero(mask.values)), len(rows.starts))

    total = passes.ranks.total(share)
    if not total.tokens:
        raise DataError(
            why_unknown(batch)
            or f"nothing to learn: `loss_mask` is False for all {len(mask.values)} tokens of {len(mask)} rows"
            f"{', and on the other ranks' if passes.ranks.size > 1 else ''}; leave such a batch out"
        )
    weights = token_weights(mask, loss.normalise, tokens=total.tokens, rows=total.rows, constant=loss.constant)
    return with_idle(micros, total.passes), StepLoss(batch, loss, weights)


class StepLoss:
    """The loss of one step, micro-batch by micro-batch. Its sums stay on the device until `sums` reads them."""

    def __init__(self, batch: Batch, loss: Loss, weights: NDArray[np.float32]) -> None:
        self._batch, self._loss, self._weights = batch, loss, weights
        self._sums: dict[str, Tensor] = {}
        """float64[] each, on the device: the sum of `loss`, and of each metric by name."""
        self._failure: Exception | None = None

    def __call__(self, predicted: Tensor, micro: MicroBatch, ranks: RankGroup) -> Tensor:
        """Return the micro-batch's part of the loss, float32[].

        If the loss raises while other ranks would wait for this one, it continues with zeros, and `sums` raises.
        """
        if micro is not IDLE and self._failure is None:
            try:
                return self._part(predicted, micro)
            except Exception as error:
                if ranks.interruptible:
                    raise
                self._failure = error
        return predicted.sum() * 0

    def sums(self) -> Mapping[str, float]:
        """Return the sums of `loss` and of its metrics, after all passes. Raises the loss's error."""
        if self._failure is not None:
            raise self._failure
        if not self._sums:  # all micro-batches were idle
            return {}
        return dict(zip(self._sums, cast("list[float]", torch.stack([*self._sums.values()]).tolist()), strict=True))

    def _part(self, predicted: Tensor, micro: MicroBatch) -> Tensor:
        logprobs, entropy = predicted.unbind(1) if predicted.dim() > 1 else (predicted, None)
        device = predicted.device
        columns = {name: torch.from_numpy(spread(self._batch, name, micro.target)) for name in self._loss.columns}
        losses = self._loss(logprobs, {name: moved(column, device) for name, column in columns.items()})
        _check_names(self._loss, losses.metrics)
        part = losses.values @ moved(torch.from_numpy(self._weights[micro.target]), device)
        own = {} if entropy is None else {"entropy": entropy}
        for name, metric in {"loss": part, **losses.metrics, **own}.items():
            before = self._sums.get(name, part.new_zeros((), dtype=torch.float64))
            self._sums[name] = before + metric.detach().sum()
        return part


def stepped(
    optimizer: Stepper, predicts: Predicts, sums: Mapping[str, float], batch: Batch, ranks: RankGroup
) -> Metrics:
    """Make the step, with the gradients and the loss's sums of all micro-batches.

    The mean of its metrics over the ranks with different rows is that of the whole batch.
    """
    size, rate = ranks.size, optimizer.lr
    norm = optimizer.step(predicts)
    own = {"loss": sums.get("loss", 0.0), "grad_norm": norm / size, "lr": rate / size}
    own |= {"rows": len(batch), "tokens": len(batch.tokens.values)}
    learned_tokens = int(np.count_nonzero(batch.loss_mask.values))
    of_tokens = {name: (total, learned_tokens) for name, total in sums.items() if name != "loss"}
    return Metrics({name: (value, 1 / size) for name, value in own.items()} | of_tokens)


def _check_logprobs(batch: Batch, loss: Loss) -> None:
    """Raise DataError if log-probs of learned tokens are not finite, which would make gradients NaN."""
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
    """Raise DataError if a loss uses a name of the step's metrics, before the step: a retry must not learn twice."""
    if taken := sorted(_OWN.intersection(metrics)):
        raise DataError(
            f"{type(loss).__name__} names a metric `{'`, `'.join(taken)}`, which every update reports: choose a name "
            f"other than {', '.join(sorted(_OWN))}"
        )
