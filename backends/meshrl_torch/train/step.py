"""The loss of some rows, and the metrics of all rows since the last step, for all trained roles."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.algo import Loss, loss_divisor, spread, token_weights
from meshrl.data import Batch, Metrics, Ragged, check_lengths, why_unknown
from meshrl.errors import DataError
from meshrl_torch.model.attention import moved
from meshrl_torch.model.packing import IDLE, MicroBatch, check_first, learned, with_idle
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.scoring import Passes
from meshrl_torch.ranks.process_group import RankGroup, Share

_OWN: Final = frozenset({"loss", "grad_norm", "lr", "rows", "tokens", "entropy"})
"""The metrics of the step itself."""


@dataclass(frozen=True)
class Added:
    """The rows whose gradients were added since the last step. Numbers are this rank's, but for `total` and `first`."""

    loss: Loss
    """The loss of the first call."""
    first: int
    """The divisor of the first call, which the gradients of all calls are divided by."""
    total: Share
    """Learned tokens and rows on all ranks."""
    value: float
    """Sum of the loss, divided by `first`."""
    rows: int
    tokens: int
    means: Metrics
    """Means of the loss's metrics over learned tokens."""

    @property
    def scale(self) -> float:
        """The factor from `first` to the divisor of all rows."""
        return self.first / _divisor(self.loss, self.total)

    def __add__(self, later: "Added") -> "Added":
        total = Share(0, self.total.tokens + later.total.tokens, self.total.rows + later.total.rows)
        value, rows, tokens = self.value + later.value, self.rows + later.rows, self.tokens + later.tokens
        return Added(self.loss, self.first, total, value, rows, tokens, Metrics.mean([self.means, later.means]))

    def check(self, loss: Loss) -> None:
        """Raise DataError if a loss is not normalised like that of the first call."""
        one, other = [(each.normalise, each.constant) for each in (self.loss, loss)]
        if one != other:
            raise DataError(
                f"{type(loss).__name__} has normalise, constant = {other}, and {type(self.loss).__name__}, whose "
                f"gradients were added since the last step, has {one}: losses of one step need the same, so call "
                "`step` in between, or normalise both alike"
            )

    def metrics(self, ranks: RankGroup, **own: float) -> Metrics:
        """Return the metrics of all these rows, with some of the step's own.

        Their mean over the ranks with different rows is that of the whole batch.
        """
        size = ranks.size
        values = {"loss": self.value * self.scale, **{name: value / size for name, value in own.items()}}
        values |= {"rows": self.rows, "tokens": self.tokens}
        return Metrics({name: (value, 1 / size) for name, value in values.items()} | dict(self.means.entries))


def prepared(
    passes: Passes, batch: Batch, loss: Loss, check: Callable[[], object], before: Added | None = None
) -> tuple[list[MicroBatch], "StepLoss"]:
    """Prepare passes: micro-batches, the same number on each rank, and the loss that weighs them together.

    `before`: the rows that take part in the same step. DataError on all ranks if there is nothing to learn, or if the
    loss does not fit these. An error of `check` on one rank is raised on all.
    """
    tokens, mask = batch.tokens, batch.loss_mask
    micros: list[MicroBatch] = []

    def share() -> Share:
        check()
        if before:
            before.check(loss)
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
    divisor = _divisor(loss, total)
    if before:
        weights *= divisor / before.first
    return with_idle(micros, total.passes), StepLoss(batch, loss, weights, total, before.first if before else divisor)


def _divisor(loss: Loss, total: Share) -> int:
    return loss_divisor(loss.normalise, tokens=total.tokens, rows=total.rows, constant=loss.constant)


class StepLoss:
    """The loss of some rows, micro-batch by micro-batch. Its numbers stay on the device until they are read."""

    def __init__(
        self, batch: Batch, loss: Loss, weights: NDArray[np.float32], total: Share, first: int, *, keeps: bool = False
    ) -> None:
        """`total` and `first`: as in `Added`. `weights`: float32[tokens], divided by `first`."""
        self._batch, self._loss, self._weights, self._total, self._first = batch, loss, weights, total, first
        self.keeps = keeps
        """True if `values` is read."""
        self._sums: dict[str, Tensor] = {}
        """float64[] each, on the device: the sum of `loss`, and of each metric by name."""
        self._kept: list[tuple[NDArray[np.int64], Tensor]] = []
        """The targets of micro-batches, and their log-probs and losses, float32[2, targets]."""
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

    def added(self, sums: Mapping[str, float]) -> Added:
        """Return what the rows add, with the sums of the rank that computed the loss."""
        learned_tokens = int(np.count_nonzero(self._batch.loss_mask.values))
        means = Metrics({name: (total, learned_tokens) for name, total in sums.items() if name != "loss"})
        rows, tokens = len(self._batch), len(self._batch.tokens.values)
        return Added(self._loss, self._first, self._total, sums.get("loss", 0.0), rows, tokens, means)

    def values(self) -> Tensor:
        """Return the log-prob and the loss of each token, float32[2, tokens], in the host's memory."""
        values = torch.zeros(2, len(self._batch.tokens.values))
        for target, own in self._kept:
            values[:, torch.from_numpy(target)] = own.cpu()
        return values

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
        if self.keeps:
            self._kept.append((micro.target, torch.stack([logprobs.detach(), losses.values.detach()]).float()))
        return part


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
