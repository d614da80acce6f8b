"""The protocol of a loss, what it returns for each token, and the fields that losses share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

from pydantic import Field, model_validator

from meshrl.config import Config
from meshrl.errors import DataError
from meshrl.losses.kl import KL, KlEstimator
from meshrl.losses.normalise import Normalise, constant_mistake

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


Predicts: TypeAlias = Literal["logprobs", "values", "scores"]
"""What a model gives of each token: a policy its log-prob, a critic the value of the state it was drawn from, a reward
model the score of what ends there."""

_MODELS: Final[Mapping[Predicts, tuple[str, str]]] = {
    "logprobs": ("policy", "ClippedLoss"),
    "values": ("critic", "ValueLoss"),
    "scores": ("reward model", "BradleyTerryLoss"),
}


@dataclass(frozen=True)
class TokenLoss:
    """What a loss says of each token.

    `values` is float[tokens] with a gradient; `metrics` are diagnostics, float[tokens] without one, which the
    backend averages over the tokens that are learned. Each has a name of its own: `loss`, `grad_norm`, `lr`, `rows` and
    `tokens` are what every update tells, and a policy's tells `entropy`.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


class Loss(Protocol):
    """A loss that the `update` of a policy, a critic or a reward model minimises: any object with these.

    It is given the learned tokens of a micro-batch, some rows of the batch, each row whole.
    """

    @property
    def predicts(self) -> Predicts:
        """What it is given first: a policy's log-probs, a critic's values, or a reward model's scores."""
        ...

    @property
    def normalise(self) -> Normalise:
        """How the token losses become one number."""
        ...

    @property
    def constant(self) -> int | None:
        """The divisor of `normalise="constant"`, in tokens; None for the other normalisations."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads: one value a token, or one a row, spread over the row's tokens.

        The name `rows` is reserved: it is not the batch's but int64[tokens], the number of each token's row within the
        micro-batch, from 0 without gaps.
        """
        ...

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token, from what the model predicts and the columns, one entry a token."""
        ...


class Normalised(Config):
    """The fields of a loss that say how the token losses become one number."""

    normalise: Normalise = "token-mean"
    """How the token losses become one number: `token_weights` has the formulas."""
    constant: int | None = Field(default=None, ge=1)
    """The divisor of `normalise="constant"`: the most tokens a completion may have."""

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
    """What losses of whole rows share: rows weigh the same, whatever their lengths."""

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
        """There is none."""
        return


class WithKl(Normalised):
    """The fields of a loss that adds `kl` times the KL to a reference where `kl` > 0, and how it does so."""

    kl: float = Field(default=0.0, ge=0)
    """The weight of the KL to the reference."""
    kl_estimator: KlEstimator = "k3"

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """The columns that the KL is read from."""
        return ("reference_logprobs",) if self.kl else ()

    def penalised(
        self, values: Tensor, metrics: Mapping[str, Tensor], logprobs: Tensor, columns: Mapping[str, Tensor]
    ) -> TokenLoss:
        """The loss of each token, float[tokens], with the KL added, and `reference_kl` among the metrics."""
        if not self.kl:
            return TokenLoss(values, metrics)
        to_reference = KL[self.kl_estimator](logprobs, columns["reference_logprobs"])
        return TokenLoss(values + self.kl * to_reference, {**metrics, "reference_kl": to_reference.detach()})


def check_predicts(loss: Loss, predicts: Predicts) -> None:
    """Refuse the loss of another kind of model: every backend's `update` calls this with what its model predicts.

    DataError where the loss is of values and the model a policy, for example.
    """
    if loss.predicts != predicts:
        (here, example), (there, _) = _MODELS[predicts], _MODELS[loss.predicts]
        raise DataError(
            f"{type(loss).__name__} is a loss of `{loss.predicts}`, which a {there} predicts, and this is a {here}: "
            f"give it to {_called(there)}, and a loss of `{predicts}` to {_called(here)}, {example} for example"
        )


def _called(model: str) -> str:
    return f"{model.replace(' ', '_')}.update"
