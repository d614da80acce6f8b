"""Losses on preferences: pairs of completions, and completions with a label good or bad.

Each is the loss of a whole row, which is told of each of its tokens. What a row's loss needs of other rows stands in
columns that were computed before the update, so a pair's rows may lie in different micro-batches and ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from meshrl.losses.base import SequenceNormalised, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

PairForm: TypeAlias = Literal["sigmoid", "ipo", "hinge"]
"""What function of a pair's margin is minimised: `dpo_loss`, `ipo_loss` or `hinge_loss`."""


class NearReference(SequenceNormalised):
    """What losses of whole rows share that hold a policy near its reference."""

    beta: float = Field(default=0.1, gt=0)
    """How much leaving the reference costs: small values let the policy go far."""


class PreferenceLoss(NearReference):
    """The loss of pairs: DPO (arXiv:2305.18290), with label smoothing where told, IPO (arXiv:2310.12036) or a hinge.

    The mean over pairs of a function of the margin, `log pi(w)/ref(w) - log pi(l)/ref(l)`, for the preferred row w and
    the other l, summed over their learned tokens. Reads `logprobs`, `margins` and `preferred`: `preference_columns`,
    and `answer_pairs` or `best_and_worst`, make them. `preferred` is 1 and -1 for the rows of a pair; where it is 0 in
    both, neither is preferred: the loss is 0 there, and nothing is learned.

    Each row moves the margin by its own log-probs, from where it was when `margins` was computed. Before the policy has
    changed the gradient is exactly that of the pairs' mean loss, however rows are divided; so compute `margins` anew
    before each update. The diagnostic `drift`, how far a token's log-prob is from `logprobs`, is 0 then but for
    rounding.
    """

    form: PairForm = "sigmoid"
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The chance that a label is wrong, of form "sigmoid": conservative DPO."""

    @model_validator(mode="after")
    def _smoothing_of_the_sigmoid(self) -> Self:
        if self.smoothing and self.form != "sigmoid":
            raise ValueError(
                f'smoothing = {self.smoothing:g} has no effect with form = "{self.form}": set form = "sigmoid", or '
                "remove it"
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("logprobs", "margins", "preferred", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token's row, float[tokens], from the policy's log-probs and the columns."""
        moved = logprobs - columns["logprobs"]
        preferred = columns["preferred"]
        values = self.of_margins(columns["margins"] + preferred * _of_rows(moved, columns["rows"]))
        # A pair's two rows give its loss twice, each with one half of its gradient, and the mean is over rows: the
        # value is right as it is, and the gradient counts twice.
        values = (2 * values - values.detach()) * preferred.abs()
        return TokenLoss(values, {"drift": moved.detach().abs()})

    def of_margins(self, margins: Tensor) -> Tensor:
        """The loss of pairs with these margins, float[any]."""
        match self.form:
            case "sigmoid":
                return dpo_loss(margins, self.beta, self.smoothing)
            case "ipo":
                return ipo_loss(margins, self.beta)
            case "hinge":
                return hinge_loss(margins, self.beta)


def dpo_loss(margins: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """The logistic loss of margins h: `-(1 - smoothing) log sigmoid(beta h) - smoothing log sigmoid(-beta h)`.

    float[any] to the same. Without smoothing DPO: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; SPIN's too (Chen
    et al. 2024, arXiv:2401.01335, with the logistic loss), whose lambda is beta. With it conservative DPO: Mitchell
    2023, "A note on DPO with noisy preferences & relationship to IPO".
    """
    scaled = beta * margins
    zero = scaled.new_zeros(())
    loss = (-scaled).logaddexp(zero)
    return loss if not smoothing else (1 - smoothing) * loss + smoothing * scaled.logaddexp(zero)


def ipo_loss(margins: Tensor, beta: float) -> Tensor:
    """The squared distance of margins h to the one that is wanted: `(h - 1 / (2 beta))^2`; float[any] to the same.

    IPO: Azar et al. 2023 (arXiv:2310.12036), the sampled loss, whose tau is beta. The margin is of sums over tokens, as
    there; some implementations divide by the lengths.
    """
    return (margins - 1 / (2 * beta)).square()


def hinge_loss(margins: Tensor, beta: float) -> Tensor:
    """`max(0, 1 - beta h)` of margins h: a pair whose margin is `1 / beta` teaches no more; float[any] to the same.

    SLiC's calibration loss on margins to a reference, as in Liu et al. 2023 (arXiv:2309.06657), "hinge-norm".
    """
    return (1 - beta * margins).clamp(min=0)


class KtoLoss(NearReference):
    """The loss of completions that are labelled good or bad, one at a time: KTO (arXiv:2402.01306).

    Reads `reference_logprobs`; `desirable` (bool, one a row); and `kl`, one number a row, the same for all: what
    `mismatched_kl` estimates. `kto_loss` has the formula. Diagnostic: `utility`, the sigmoid in it.
    """

    desirable: float = Field(default=1.0, ge=0)
    """lambda_D, the weight of good rows. Where there are many fewer of them than bad ones, raise it."""
    undesirable: float = Field(default=1.0, ge=0)
    """lambda_U, the weight of bad rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("reference_logprobs", "desirable", "kl", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each token's row, float[tokens], from the policy's log-probs and the columns."""
        log_ratios = _of_rows(logprobs - columns["reference_logprobs"], columns["rows"])
        desirable = columns["desirable"] > 0
        utility = kto_utility(log_ratios, columns["kl"], desirable, self.beta)
        weights = utility.new_full(utility.shape, self.undesirable).masked_fill(desirable, self.desirable)
        return TokenLoss(weights * (1 - utility), {"utility": utility.detach()})


def kto_utility(log_ratios: Tensor, kl: Tensor, desirable: Tensor, beta: float) -> Tensor:
    """How good a row looks: `sigmoid(beta (r - z))` for a desirable one, `sigmoid(beta (z - r))` for another.

    `log_ratios` r and `kl` z float[any], `desirable` bool of the same shape, as the answer. KTO's value v is this times
    the row's weight lambda, and its loss the mean of `lambda - v`: Ethayarajh et al. 2024 (arXiv:2402.01306), L_KTO. No
    gradient goes through z.
    """
    gain = beta * (log_ratios - kl.detach())
    return gain.where(desirable, -gain).sigmoid()


def _of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """The sum over each token's row, for each token: float[tokens]."""
    return values.new_zeros(len(values)).index_add(0, rows, values)[rows]
