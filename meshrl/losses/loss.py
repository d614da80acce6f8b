"""What a loss is: the protocol, what it says of each token, and the fields that losses share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pydantic import Field, model_validator

from meshrl.config import Config
from meshrl.losses.normalise import Normalise, constant_mistake

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """What a loss says of each token.

    `values` is float[tokens] with a gradient; `metrics` are diagnostics, float[tokens] without one, which the
    backend averages over the tokens that are learned.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


class Loss(Protocol):
    """A loss that `Policy.update` minimises: any object with these, a frozen dataclass for example.

    It is given the learned tokens of a micro-batch, some rows of the batch, each row whole.
    """

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
        """The loss of each token, from the policy's log-probs and the columns, one entry a token."""
        ...


class Normalised(Config):
    """The fields of a loss that say how the token losses become one number."""

    normalise: Normalise = "token-mean"
    """How the token losses become one number: `token_weights` has the formulas."""
    constant: int | None = Field(default=None, ge=1)
    """The divisor of `normalise="constant"`: the most tokens a completion may have."""

    @model_validator(mode="after")
    def _constant_where_it_is_used(self) -> Self:
        if mistake := constant_mistake(self.normalise, self.constant):
            raise ValueError(mistake)
        return self
