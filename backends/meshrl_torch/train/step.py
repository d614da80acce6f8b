"""The loss of some rows, and the metrics of all rows since the last step, for all trained roles."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.algo import Loss, loss_divisor, spread, token_weights
from meshrl.data import Batch, Metrics, Ragged, why_unknown
from meshrl.errors import DataError
from meshrl_torch.model.attention import moved
from meshrl_torch.model.packing import IDLE, MicroBatch, check_first, learned, with_idle
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.scoring import Passes, Readers, readers
from meshrl_torch.ranks.process_group import RankGroup, Share

_OWN: Final = frozenset({"loss", "grad_norm", "lr", "rows", "tokens", "entropy"})
"""The metrics of the step itself."""


@dataclass(frozen=True)
class Added:
    """The rows whose gradients were added since the last step. Numbers are this rank's, except `total` and `first`."""

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
    passes: Passes, batch: Batch, loss: Loss, check: Callable[[], object], before: Mapping[str, Added]
) -> tuple[list[MicroBatch], "StepLoss"]:
    """Prepare passes: micro-batches, the same number on each rank, and the loss that weighs them together.

    `before`: the rows that take part in the same step, by adapter. DataError on all ranks if there is nothing to learn,
    or if the loss does not fit these. An error of `check` on one rank is raised on all.
    """
    tokens, mask = batch.tokens, batch.loss_mask
    micros: list[MicroBatch] = []
    found: list[Readers] = []

    def shares() -> Mapping[str, Share]:
        check()
        own = readers(passes.model, batch)
        found.append(own)
        for name in before.keys() & set(own.names):
            before[name].check(loss)
        _check_columns(batch, loss)
        check_first(tokens, mask)
        native = passes.model.native_tokens + (loss.predicts == "scores")  # such rows have one more token
        rows = learned(tokens, mask, apart=COLUMN in batch, native=native, readers=own.rows)
        micros.extend(passes.split(tokens, rows, mask, passes.budget))
        learns = np.bincount(
            np.repeat(own.rows, mask.lengths)[np.asarray(mask.values, np.bool_)], minlength=len(own.names)
        )
        counts = np.bincount(rows.reader, minlength=len(own.names))
        each = zip(own.names, learns.tolist(), counts.tolist(), strict=True)
        return {name: Share(len(micros), count, number) for name, count, number in each}

    totals = passes.ranks.totals(shares)
    if not any(total.tokens for total in totals.values()):
        raise DataError(
            why_unknown(batch)
            or f"nothing to learn: `loss_mask` is False for all {len(mask.values)} tokens of {len(mask)} rows"
            f"{', and on the other ranks' if passes.ranks.size > 1 else ''}; leave such a batch out"
        )
    if empty := [name for name, total in totals.items() if not total.tokens]:
        raise DataError(f"nothing to learn for the adapter {empty[0]!r}: `loss_mask` is False for all of its rows")
    firsts = {name: before[name].first if name in before else _divisor(loss, total) for name, total in totals.items()}
    weights = np.zeros(len(tokens.values), np.float32)
    of_tokens = np.repeat(found[0].rows, tokens.lengths)
    for number, name in enumerate(found[0].names):
        total = totals[name]
        mine = Ragged(mask.values & (of_tokens == number), mask.offsets)
        own = token_weights(mine, loss.normalise, tokens=total.tokens, rows=total.rows, constant=loss.constant)
        if name in before:
            own *= _divisor(loss, total) / firsts[name]
        weights += own
    passes_of_all = max(total.passes for total in totals.values())
    return with_idle(micros, passes_of_all), StepLoss(batch, loss, weights, found[0], totals, firsts)


def _divisor(loss: Loss, total: Share) -> int:
    return loss_divisor(loss.normalise, tokens=total.tokens, rows=total.rows, constant=loss.constant)


class StepLoss:
    """The loss of some rows, micro-batch by micro-batch. Its numbers stay on the device until they are read."""

    def __init__(
        self,
        batch: Batch,
        loss: Loss,
        weights: NDArray[np.float32],
        own: Readers,
        totals: Mapping[str, Share],
        firsts: Mapping[str, int],
        *,
        keeps: bool = False,
    ) -> None:
        """`totals` and `firsts`: as in `Added`, by adapter. `weights`: float32[tokens], divided by these `firsts`.

        `own`: the adapters of this rank's rows.
        """
        self._batch, self._loss, self._weights, self._firsts = batch, loss, weights, firsts
        self._own, self._of_tokens = own, np.repeat(own.rows, batch.tokens.lengths)
        self.totals: Final = totals
        self.keeps = keeps
        """True if `values` is read."""
        self._sums: dict[tuple[str, str], Tensor] = {}
        """float64[] each, on the device: the sum of `loss`, and of each metric, by adapter and name."""
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

    def sums(self) -> Mapping[tuple[str, str], float]:
        """Return the sums of `loss` and of its metrics, by adapter, after all passes. Raises the loss's error."""
        if self._failure is not None:
            raise self._failure
        if not self._sums:  # all micro-batches were idle
            return {}
        return dict(zip(self._sums, cast("list[float]", torch.stack([*self._sums.values()]).tolist()), strict=True))

    def added(self, sums: Mapping[tuple[str, str], float]) -> Mapping[str, Added]:
        """Return what the rows add to each adapter, with the sums of the rank that computed the loss."""
        mask, result = np.asarray(self._batch.loss_mask.values, np.bool_), dict[str, Added]()
        for name in sorted(self.totals):
            number = self._own.names.index(name) if name in self._own.names else -1
            mine = self._of_tokens == number
            own = {key: total for (adapter, key), total in sums.items() if adapter == name}
            value, count = own.pop("loss", 0.0), int(np.count_nonzero(mask & mine))
            means = Metrics({key: (total, count) for key, total in own.items()})
            rows, tokens = int(np.count_nonzero(self._own.rows == number)), int(np.count_nonzero(mine))
            result[name] = Added(self._loss, self._firsts[name], self.totals[name], value, rows, tokens, means)
        return result

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
        weights = moved(torch.from_numpy(self._weights[micro.target]), device)
        part = losses.values @ weights
        own = {} if entropy is None else {"entropy": entropy}
        numbers = self._of_tokens[micro.target]
        several = np.unique(numbers)
        for number in several:
            values = {"loss": part, **losses.metrics, **own}
            if len(several) > 1:
                mine = moved(torch.from_numpy(np.flatnonzero(numbers == number)), device)
                values = {name: metric[mine] for name, metric in {**values, "loss": losses.values * weights}.items()}
            for name, metric in values.items():
                key = self._own.names[number], name
                before = self._sums.get(key, part.new_zeros((), dtype=torch.float64))
                self._sums[key] = before + metric.detach().sum()
        if self.keeps:
            self._kept.append((micro.target, torch.stack([logprobs.detach(), losses.values.detach()]).float()))
        return part


def _check_columns(batch: Batch, loss: Loss) -> None:
    """Raise DataError if the loss cannot read a column, or if log-probs of learned tokens would make gradients NaN."""
    for name in loss.columns:
        spread(batch, name, np.empty(0, np.int64))
        if name.endswith("logprobs") and isinstance(column := batch[name], Ragged):
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
