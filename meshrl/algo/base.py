"""The protocol of losses, how token losses become one number, and the checks that every update makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from meshrl.algo.columns import learned_rows
from meshrl.algo.kl import KL, KlEstimator
from meshrl.config import Config
from meshrl.data import is_ragged
from meshrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from meshrl.data import Batch, Origin, Ragged

Normalise: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum", "constant", "sum"]
"""How the token losses of a batch become one number: see `token_weights`."""
Predicts: TypeAlias = Literal["logprobs", "values", "scores"]
"""A model's prediction for each token: a policy's log-prob, a critic's value of the state before it, or a reward
model's score of the text that ends there."""

_MODELS: Final[Mapping[Predicts, tuple[str, str, str]]] = {
    "logprobs": ("policy", "policy.update", "ClippedLoss"),
    "values": ("critic", "critic.update", "ValueLoss"),
    "scores": ("reward model", "reward_model.update", "BradleyTerryLoss"),
}
"""The model that predicts it, the call that takes its losses, and one of them."""
_PROMISED: Final[Mapping[str, tuple[Origin, str]]] = {
    "sampler_logprobs": ("sampler", "train on rows as `sampler.generate` returned them"),
    "logprobs": ("trainer", "call `batch = await policy.logprobs(batch)` before the update"),
    "reference_logprobs": ("reference", "call `batch = await reference.logprobs(batch)` before the update"),
}
"""The source that a column's name promises, and how to get such a column."""


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, and diagnostics.

    `values` is float[tokens] with a gradient. `metrics` are diagnostics, float[tokens] without a gradient, which the
    backend averages over learned tokens. Their names must not be `loss`, `grad_norm`, `lr`, `rows` or `tokens`, which
    every update reports, nor `entropy`, which a policy's update reports.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


class Loss(Protocol):
    """A loss for the `update` of a policy, a critic or a reward model: any object with these members.

    It receives the learned tokens of a micro-batch: some rows of the batch, each of them whole.
    """

    @property
    def predicts(self) -> Predicts:
        """The kind of its first argument: a policy's log-probs, a critic's values, or a reward model's scores."""
        ...

    @property
    def normalise(self) -> Normalise:
        """How token losses become one number."""
        ...

    @property
    def constant(self) -> int | None:
        """The divisor of `normalise="constant"`, in tokens; None for the other normalisations."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads. A column with one value for each row is repeated over its tokens.

        The name `rows` is reserved for int64[tokens], the number of each token's row in the micro-batch, from 0 without
        gaps.
        """
        ...

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token from the model's predictions and the columns, all of shape [tokens]."""
        ...


class Normalised(Config):
    """The base of losses of tokens: the fields that say how token losses become one number."""

    normalise: Normalise = "token-mean"
    """How token losses become one number. See `token_weights` for the formulas."""
    constant: int | None = Field(default=None, ge=1)
    """Divisor of `normalise = "constant"`, in tokens: the longest completion that is allowed."""

    @property
    def predicts(self) -> Predicts:
        """A policy's log-probs."""
        return "logprobs"

    @model_validator(mode="after")
    def _constant_where_it_is_used(self) -> Self:
        if mistake := constant_mistake(self.normalise, self.constant):
            raise ValueError(mistake)
        return self


class SequenceNormalised(Config):
    """The base of losses of whole rows. Rows have the same weight, regardless of their lengths."""

    @property
    def predicts(self) -> Predicts:
        """A policy's log-probs."""
        return "logprobs"

    @property
    def normalise(self) -> Normalise:
        """The mean over rows."""
        return "sequence-mean"

    @property
    def constant(self) -> None:
        """None: rows are not divided by a constant."""
        return


class WithKl(Normalised):
    """The base of losses that add `kl` times the KL to a reference if `kl` > 0."""

    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference. 0: no reference is needed."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL: `k3` is unbiased, and `k2` has the KL's gradient."""

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """The columns that the KL is read from."""
        return ("reference_logprobs",) if self.kl else ()

    def penalised(
        self, values: Tensor, metrics: Mapping[str, Tensor], logprobs: Tensor, columns: Mapping[str, Tensor]
    ) -> TokenLoss:
        """Add the KL to the loss of each token, float[tokens], and `reference_kl` to the metrics."""
        if not self.kl:
            return TokenLoss(values, metrics)
        to_reference = KL[self.kl_estimator](logprobs, columns["reference_logprobs"])
        return TokenLoss(values + self.kl * to_reference, {**metrics, "reference_kl": to_reference.detach()})


def row_sums(values: Tensor, rows: Tensor) -> Tensor:
    """Sum values over the row of each token. All are [tokens]. `rows`: the number of each token's row, from 0.

    There are at most as many rows as tokens, so no number is fetched from the device.
    """
    return values.new_zeros(len(values)).index_add(0, rows, values)[rows]


def token_weights(
    loss_mask: Ragged, normalise: Normalise, *, tokens: int, rows: int, constant: int | None = None
) -> NDArray[np.float32]:
    """Compute the weight of each token. The loss is `sum(weights * losses)` over all ranks and micro-batches.

    `loss_mask` (bool) covers some rows of the global batch. `tokens` is the number of learned tokens of the global
    batch, and `rows` the number of its rows that have any. Returns float32[tokens of the given rows], zero where the
    mask is False.

    - "token-mean": `1 / tokens`. Long rows weigh more. DAPO (arXiv:2503.14476), equation 12, which takes the mean over
      a prompt's group instead of the batch.
    - "sequence-mean": `1 / (rows * learned tokens of the row)`. Rows weigh the same. DeepSeekMath (arXiv:2402.03300),
      equation 3.
    - "sequence-sum": `1 / rows`. A row's loss is the sum over its tokens, like the log-probability of a sequence.
      REINFORCE: Williams 1992; RLOO (arXiv:2402.14740).
    - "constant": `1 / (rows * constant)`, where `constant` is the longest completion that is allowed, in tokens. No
      length bias. Dr. GRPO (arXiv:2503.20783), section 3.
    - "sum": 1. The gradient grows with the batch, and the rows or their columns carry the scale.

    Raises ConfigError if `constant` is missing or has no effect, and DataError if the totals are smaller than those of
    the given rows.
    """
    whole = loss_divisor(normalise, tokens=tokens, rows=rows, constant=constant)
    row = learned_rows(loss_mask)
    learned = np.bincount(row, minlength=len(loss_mask))
    own_tokens, own_rows = int(learned.sum()), int((learned > 0).sum())
    if own_tokens > tokens or own_rows > rows:
        raise DataError(
            f"token_weights: the given rows have {own_tokens} learned tokens in {own_rows} rows, more than "
            f"the {tokens} tokens and {rows} rows given for the global batch. "
            "Sum both over all ranks and micro-batches."
        )
    divisor = whole * learned if normalise == "sequence-mean" else np.full(len(loss_mask), whole)
    weights = np.zeros(len(loss_mask.values), np.float32)
    weights[np.asarray(loss_mask.values, np.bool_)] = 1 / divisor[row]
    return weights


def loss_divisor(normalise: Normalise, *, tokens: int, rows: int, constant: int | None = None) -> int:
    """Return the divisor of a batch's loss, which is summed over tokens, or over the means of rows ("sequence-mean").

    `tokens` and `rows` count what is learned of the global batch. The divisor of two batches together is the sum of
    both, except for "sum". Raises ConfigError if `constant` is missing or has no effect.
    """
    if mistake := constant_mistake(normalise, constant):
        raise ConfigError(mistake)
    divisors = {"token-mean": tokens, "sum": 1, "constant": rows * (constant or 0)}
    return divisors.get(normalise, rows)


def constant_mistake(normalise: Normalise, constant: int | None) -> str | None:
    """Describe the mistake if the constant is missing or has no effect. None if there is no mistake."""
    if normalise == "constant" and constant is None:
        return (
            'normalise = "constant" divides by `constant` tokens, which is not set: '
            "set it to the longest completion that is allowed, in tokens"
        )
    if normalise != "constant" and constant is not None:
        return f'constant = {constant} has no effect with normalise = "{normalise}": remove one of them'
    return None


def check_predicts(loss: Loss, predicts: Predicts) -> None:
    """Check that a loss fits a model. Every backend's `update` calls this with what its model predicts.

    Raises DataError if it does not, such as a loss of values for a policy.
    """
    if loss.predicts != predicts:
        (here, call, example), (there, its_call, _) = _MODELS[predicts], _MODELS[loss.predicts]
        raise DataError(
            f"{type(loss).__name__} is a loss of `{loss.predicts}`, which a {there} predicts, but this is a {here}: "
            f"pass it to {its_call}, and a loss of `{predicts}`, such as {example}, to {call}"
        )


def check_sources(batch: Batch, loss: Loss, version: int | None = None) -> None:
    """Check that the log-probs for a loss come from the right models. Every backend's `update` calls this first.

    `sampler_logprobs` must come from the sampler, `logprobs` from the trainer, and `reference_logprobs` from the
    reference. `version` is the number of updates of the policy. If given, the trainer's log-probs must not be of a
    later version. A token column without a source, made by hand, is accepted. Raises DataError if one of these columns
    is missing, has another source, or does not have one number for each token.
    """
    for name in loss.columns:
        if name not in _PROMISED:
            continue
        role, remedy = _PROMISED[name]
        reads = f"{type(loss).__name__} reads `{name}`"
        if name not in batch:
            raise DataError(f"{reads}, which the batch does not have: {remedy}")
        if not is_ragged(batch.stored[name]):
            raise DataError(f"{reads} of each token, but the batch's is not a token column (a Ragged): {remedy}")
        source = batch.source(name)
        if source is None:
            continue
        if source.role != role:
            raise DataError(
                f"{reads}, which must come from the {role}, but the batch's were computed by the {source.role}: "
                f"{remedy}"
            )
        if role == "trainer" and version is not None and (source.newest or 0) > version:
            raise DataError(
                f"{reads}, which the trainer computed at version {source.newest}, and this policy is at version "
                f"{version}: they are of weights that it has not had; {remedy}"
            )
