"""The rows of a pass as a batch, the loss by its name, and the batch's log-probs as the client expects them.

A client's row has a target for each token that the model reads. A batch's token is its own target, one place later: so
a row of the batch begins with the row's tokens and ends with its last target, and `targets` has the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from meshrl.algo import CispoSum, ClippedSum, DroLoss, GspoSum, ImportanceLoss, SumLoss, WeightedCrossEntropy
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError, did_you_mean
from meshrl.remote import Call
from meshrl.tinker.requests import Pass, Request, Tensor, concatenated
from meshrl.tinker.results import Passed


class _Kind(NamedTuple):
    """A built-in loss."""

    make: Callable[..., SumLoss]
    columns: Mapping[str, str]
    """The batch's column for each tensor of a row."""
    settings: Mapping[str, str]
    """The loss's field for each key of `loss_fn_config`."""


_RATIO: Final = {"logprobs": "sampler_logprobs", "advantages": "advantages"}
_BOUNDS: Final = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
_KINDS: Final[Mapping[str, _Kind]] = {
    "cross_entropy": _Kind(WeightedCrossEntropy, {"weights": "weights"}, {}),
    "importance_sampling": _Kind(ImportanceLoss, _RATIO, {}),
    "ppo": _Kind(ClippedSum, _RATIO, _BOUNDS),
    "cispo": _Kind(CispoSum, _RATIO, _BOUNDS),
    "dro": _Kind(DroLoss, _RATIO, {"beta": "beta"}),
    "gspo": _Kind(GspoSum, _RATIO | {"sequence_ratio_mask": "ratio_mask"}, _BOUNDS),
}
_ELSEWHERE: Final[Mapping[str, str]] = {
    "stable_reinforce": "its formula is not published: take importance_sampling, ppo, cispo or gspo",
    "custom": "this server runs no custom losses: forward_backward_custom runs them in the client",
}
"""Why a loss that the SDK knows is refused."""
_HELD: Final = 20.0
"""Between this and its negative, log-ratios are held."""
_TARGETS: Final = "target_tokens"
_WEIGHTS: Final = "weights"


def loss_of(request: Pass) -> SumLoss:
    """Return the loss that a request names. DataError if there is none, or it has no such setting."""
    kind = _kind(request.loss)
    if unknown := sorted(request.config.keys() - kind.settings):
        raise DataError(
            f"the loss {request.loss} has no setting {unknown[0]!r}: it has {', '.join(kind.settings) or 'none'}"
        )
    try:
        return kind.make(**{kind.settings[name]: value for name, value in request.config.items()})
    except ValidationError as error:
        raise DataError(f"loss_fn_config of {request.loss}: {error.errors()[0]['msg']}") from error


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        hint = _ELSEWHERE.get(name) or did_you_mean(name, _KINDS) or f"this server has {', '.join(_KINDS)}"
        raise DataError(f"there is no loss {name!r}: {hint}")
    return _KINDS[name]


def batch_of(request: Pass) -> Batch:
    """Return the rows of a request: `tokens`, `targets`, `loss_mask`, and the columns that its loss reads.

    DataError names a row that does not fit.
    """
    if not request.data:
        raise DataError("the request has no rows: send at least one datum")
    kind = _kind(request.loss)
    columns, names = kind.columns, _tensors(request)
    counts = np.array([_checked(request, names, place) for place in range(len(request.data))])
    offsets = np.concatenate([[0], np.cumsum(counts + 1)])
    predicted = np.ones(offsets[-1], np.bool_)
    predicted[offsets[:-1]] = False
    read = np.ones(offsets[-1], np.bool_)
    read[offsets[1:] - 1] = False
    target = concatenated([datum.inputs[_TARGETS] for datum in request.data])
    _check(np.abs(target) < 2**31, counts, f"{_TARGETS} are no token ids of int64")
    tokens, targets = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.int32)
    tokens[read] = targets[read] = np.frombuffer(b"".join([datum.tokens for datum in request.data]), np.int32)
    tokens[~read] = target[np.cumsum(counts) - 1]
    targets[predicted] = target
    ragged: dict[str, Ragged] = {}
    for name, values in _floats(request, names, counts).items():
        whole = np.zeros(offsets[-1], np.float32)
        whole[predicted] = values
        ragged[columns[name]] = Ragged(whole, offsets)
    return Batch.of(
        tokens=Ragged(tokens, offsets),
        targets=Ragged(targets, offsets),
        loss_mask=Ragged(predicted, offsets),
        **ragged,
    )


def _tensors(request: Pass) -> Sequence[str]:
    """Return the tensors that are read with the targets: those of the loss, and weights of its advantages."""
    needed = _kind(request.loss).columns
    weighed = _WEIGHTS not in needed and request.loss != "dro" and any(_WEIGHTS in each.inputs for each in request.data)
    return (*needed, _WEIGHTS) if weighed else tuple(needed)


def _checked(request: Pass, names: Sequence[str], place: int) -> int:
    """Return the number of tokens that the model reads of a row. DataError if a tensor does not fit."""
    datum, needed = request.data[place], _kind(request.loss).columns
    where, count, target = f"datum {place}", len(datum.ids), datum.inputs.get(_TARGETS)
    if target is None:
        raise DataError(f"{where} has no {_TARGETS}: give the token that each position has to predict")
    if len(target.shape) != 1:
        raise DataError(f"{where}: {_TARGETS} has the shape {list(target.shape)}: this server takes one for a position")
    if target.shape[0] != count or not count:
        raise DataError(f"{where}: {target.shape[0]} {_TARGETS} for {count} tokens: give one for each token")
    if target.dtype == "float32":
        raise DataError(f"{where}: {_TARGETS} are no token ids of int64")
    for name, tensor in datum.inputs.items():
        if name != _TARGETS and name not in names:
            reads = ", ".join(sorted((_TARGETS, *names)))
            raise DataError(f"{where}: the loss {request.loss} reads no {name!r}: it reads {reads}")
        if tensor.shape != target.shape:
            raise DataError(
                f"{where}: {name} has the shape {list(tensor.shape)} for {count} tokens: give one number for each"
            )
    if missing := sorted(needed.keys() - datum.inputs.keys()):
        raise DataError(f"{where} has no {missing[0]}: the loss {request.loss} reads {', '.join(needed)}")
    return count


def _floats(request: Pass, names: Sequence[str], counts: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Return the tensors that the loss reads, of all rows, float32[tokens]. Weights of a loss of ratios are applied."""
    given: dict[str, NDArray[np.float32]] = {}
    for name in names:
        rows = [each.inputs.get(name) or _ones(count) for each, count in zip(request.data, counts, strict=True)]
        given[name] = concatenated(rows).astype(np.float32)
        _check(np.isfinite(given[name]), counts, f"{name} has numbers that are not finite: leave the row out")
    if _WEIGHTS not in _kind(request.loss).columns and _WEIGHTS in given:
        weights = given.pop(_WEIGHTS)
        _check(weights >= 0, counts, f"weights of the loss {request.loss} must not be negative")
        given["advantages"] = given["advantages"] * weights
    return given


def _ones(count: int) -> Tensor:
    """Return the weights of a row that has none."""
    return Tensor(np.ones(count, np.float32).tobytes(), "float32", (count,))


def _check(fits: NDArray[np.bool_], counts: NDArray[np.int64], what: str) -> None:
    """DataError with the first row that has a value which does not fit. `fits`: bool[tokens of all rows]."""
    if not fits.all():
        row = int(np.searchsorted(np.cumsum(counts), int(fits.argmin()), "right"))
        raise DataError(f"datum {row}: {what}")


def passed(batch: Batch, logprobs: Ragged, losses: NDArray[np.float32] | NDArray[np.float64]) -> Passed:
    """Return a request's result: the log-prob of each target, and the sum of the losses.

    `batch` is that of `batch_of`, `logprobs` are ragged float32 of its rows, and `losses` float[tokens].
    """
    values = np.asarray(logprobs.values, np.float32)[np.asarray(batch.loss_mask.values, np.bool_)]
    metrics = {"loss:sum": float(np.sum(losses, dtype=np.float64))}
    return Passed((logprobs.lengths - 1).tolist(), values.tobytes(), metrics)


def losses_of(loss: SumLoss, batch: Batch, logprobs: Ragged) -> NDArray[np.float64]:
    """Return the losses of the learned tokens, float64[tokens], for a pass without gradients.

    The core has no torch, in which the losses are written. So their values are here once more.
    """
    learned = np.asarray(batch.loss_mask.values, np.bool_)
    columns = {name: batch.ragged(name).values[learned] for name in loss.columns if name != "rows"}
    given: dict[str, NDArray[np.float64]] = {name: np.asarray(each, np.float64) for name, each in columns.items()}
    now: NDArray[np.float64] = np.asarray(logprobs.values[learned], np.float64)
    if isinstance(loss, WeightedCrossEntropy):
        return -given["weights"] * now
    ratios, advantages = now - given["sampler_logprobs"], given["advantages"]
    if isinstance(loss, DroLoss):
        return loss.beta / 2 * ratios**2 - advantages * now
    if isinstance(loss, GspoSum):
        row, counted = np.repeat(np.arange(len(batch)), batch.tokens.lengths)[learned], given["ratio_mask"] != 0
        counts = np.bincount(row[counted], minlength=len(batch))
        means = np.bincount(row[counted], ratios[counted], len(batch)) / np.maximum(counts, 1)
        ratios = means[row]
    held: NDArray[np.float64] = np.exp(ratios.clip(-_HELD, _HELD))
    bounded = held
    if isinstance(loss, CispoSum | ClippedSum | GspoSum):
        bounded = held.clip(loss.low, loss.high)
    if isinstance(loss, CispoSum):
        return -bounded * advantages * now
    found: NDArray[np.float64] = np.maximum(-held * advantages, -bounded * advantages)
    return found


class Size(NamedTuple):
    """How much a request reads."""

    rows: int = 0
    tokens: int = 0


def size_of(request: Request) -> Size:
    """Return the rows and tokens of a request. None are counted that cannot be read."""
    if isinstance(request, Pass):
        return Size(len(request.data), sum(len(datum.tokens) // 4 for datum in request.data))
    if not isinstance(request, Call) or request.batch is None:
        return Size()
    try:
        batch = request.batch.batch()
        return Size(len(batch), len(batch.tokens.values) if "tokens" in batch else 0)
    except Exception:  # noqa: BLE001 -- why it cannot be read is the request's result
        return Size()
