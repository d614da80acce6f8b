"""The rows of a pass as a batch, the loss by its name, and the batch's log-probs as the client expects them.

A client's row has a target for each token that the model reads. A batch's token is its own target, one place later: so
a row of the batch begins with the row's tokens and ends with its last target, and `targets` has the others.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from meshrl.algo import CispoSum, ClippedSum, DroLoss, GspoSum, ImportanceLoss, SumLoss, WeightedCrossEntropy
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError, did_you_mean
from meshrl.remote import Call
from meshrl.tinker.requests import Datum, Pass, Request
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

    DataError names the first row that does not fit.
    """
    columns = _kind(request.loss).columns
    if not request.data:
        raise DataError("the request has no rows: send at least one datum")
    tokens: list[NDArray[np.int32]] = []
    targets: list[NDArray[np.int32]] = []
    read: dict[str, list[NDArray[np.float32]]] = {name: [] for name in columns.values()}
    for place, datum in enumerate(request.data):
        where = f"datum {place}"
        ids, target = datum.ids, _targets(datum, where)
        tokens += [ids, target[-1:]]
        targets += [ids[:1], target]
        given = _tensors(request.loss, datum, len(ids), where)
        for name, values in given.items():
            read[columns[name]] += [_NOTHING, values]
    lengths = np.array([len(datum.ids) + 1 for datum in request.data])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    ragged = {name: Ragged(np.concatenate(values), offsets) for name, values in read.items()}
    return Batch.of(
        tokens=Ragged(np.concatenate(tokens), offsets),
        targets=Ragged(np.concatenate(targets), offsets),
        loss_mask=Ragged(mask, offsets),
        **ragged,
    )


_NOTHING: Final = np.zeros(1, np.float32)
"""The value of a row's first token, which nothing predicts."""


def _targets(datum: Datum, where: str) -> NDArray[np.int32]:
    if _TARGETS not in datum.inputs:
        raise DataError(f"{where} has no {_TARGETS}: give the token that each position has to predict")
    values = datum.inputs[_TARGETS].array
    if values.ndim != 1:
        raise DataError(f"{where}: {_TARGETS} has the shape {list(values.shape)}: this server takes one for a position")
    if len(values) != len(datum.ids) or not len(values):
        raise DataError(f"{where}: {len(values)} {_TARGETS} for {len(datum.ids)} tokens: give one for each token")
    if values.dtype.kind != "i" or not (np.abs(values) < 2**31).all():
        raise DataError(f"{where}: {_TARGETS} are no token ids of int64")
    return values.astype(np.int32)


def _tensors(loss: str, datum: Datum, tokens: int, where: str) -> dict[str, NDArray[np.float32]]:
    """Return the tensors that the loss reads. `weights`, if a loss of ratios has them, weigh the advantages."""
    columns = _kind(loss).columns
    known = {_TARGETS, *columns, *((_WEIGHTS,) if loss != "dro" else ())}
    if unknown := sorted(datum.inputs.keys() - known):
        raise DataError(f"{where}: the loss {loss} reads no {unknown[0]!r}: it reads {', '.join(sorted(known))}")
    given: dict[str, NDArray[np.float32]] = {}
    for name, tensor in datum.inputs.items():
        if name == _TARGETS:
            continue
        values = tensor.array
        if values.shape != (tokens,):
            raise DataError(
                f"{where}: {name} has the shape {list(values.shape)} for {tokens} tokens: give one number for each"
            )
        given[name] = values.astype(np.float32)
        if not np.isfinite(given[name]).all():
            raise DataError(f"{where}: {name} has numbers that are not finite: leave the row out")
    if missing := sorted(columns.keys() - given.keys()):
        raise DataError(f"{where} has no {missing[0]}: the loss {loss} reads {', '.join(columns)}")
    if _WEIGHTS not in columns and _WEIGHTS in given:
        weights = given.pop(_WEIGHTS)
        if (weights < 0).any():
            raise DataError(f"{where}: weights of the loss {loss} must not be negative")
        given["advantages"] = given["advantages"] * weights
    return given


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
