"""The protocol of losses, the result of a loss, and the fields that losses share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

from pydantic import Field, model_validator

from meshrl.algo.kl import KL, KlEstimator
from meshrl.algo.normalise import Normalise, constant_mistake
from meshrl.config import Config
from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


Predicts: TypeAlias = Literal["logprobs", "values", "scores"]
"""A model's prediction for each token: a policy's log-prob, a critic's value of the state before it, or a reward
model's score of the text that ends there."""

_MODELS: Final[Mapping[Predicts, tuple[str, str]]] = {
    "logprobs": ("policy", "ClippedLoss"),
    "values": ("critic", "ValueLoss"),
    "scores": ("reward model", "BradleyTerryLoss"),
}


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
    """The fields of a loss that say how token losses become one number."""

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


def check_predicts(loss: Loss, predicts: Predicts) -> None:
    """Check that a loss fits a model. Every backend's `update` calls this with what its model predicts.

    Raises DataError if it does not, such as a loss of values for a policy.
    """
    if loss.predicts != predicts:
        (here, example), (there, _) = _MODELS[predicts], _MODELS[loss.predicts]
        raise DataError(
            f"{type(loss).__name__} is a loss of `{loss.predicts}`, which a {there} predicts, but this is a {here}: "
            f"pass it to {_called(there)}, and a loss of `{predicts}`, such as {example}, to {_called(here)}"
        )


def _called(model: str) -> str:
    return f"{model.replace(' ', '_')}.update"
