"""Preference losses: for pairs of completions, and for completions that are labelled good or bad.

Each is a loss of a whole row, and every token of the row has its value. Columns that are computed before the update
hold what a row needs from other rows. So the rows of a pair may be in different micro-batches and on different ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from meshrl.algo.base import SequenceNormalised, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

PairForm: TypeAlias = Literal["sigmoid", "ipo", "hinge"]
"""The function of a pair's margin that is minimised: `dpo_loss`, `ipo_loss` or `hinge_loss`."""


class NearReference(SequenceNormalised):
    """The fields of losses of whole rows that hold a policy near its reference."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference. Small values let the policy move far from it."""


class PreferenceLoss(NearReference):
    """The loss of preference pairs: DPO (arXiv:2305.18290), IPO (arXiv:2310.12036) or a hinge.

    The loss is the mean over pairs of a function of the margin, `log pi(w)/ref(w) - log pi(l)/ref(l)`, for the
    preferred row w and the other row l, summed over their learned tokens. Reads `logprobs`, `margins` and `preferred`,
    which `preference_columns` and `answer_pairs` or `best_and_worst` make. `preferred` is 1 and -1 for the rows of a
    pair. If it is 0 in both, neither is preferred: the loss is 0 and nothing is learned.

    Each row changes the margin by its own log-probs, starting from `margins`. Until the policy changes, the gradient is
    exactly that of the pairs' mean loss, regardless of how rows are divided. So compute `margins` again before each
    update. The diagnostic `drift`, the distance of a token's log-prob from `logprobs`, is then 0 except for rounding.
    """

    form: PairForm = "sigmoid"
    """The function of the margin: `sigmoid` is DPO, `ipo` is IPO, `hinge` is a hinge."""
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a label is wrong, for form "sigmoid" (conservative DPO)."""

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
        """The batch columns that the loss reads."""
        return ("logprobs", "margins", "preferred", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token's row, float[tokens]."""
        moved = logprobs - columns["logprobs"]
        preferred = columns["preferred"]
        values = self.of_margins(columns["margins"] + preferred * _of_rows(moved, columns["rows"]))
        # Both rows of a pair give its loss, each with half of its gradient, and the mean is over rows. So the value is
        # right, and the gradient is doubled here.
        values = (2 * values - values.detach()) * preferred.abs()
        return TokenLoss(values, {"drift": moved.detach().abs()})

    def of_margins(self, margins: Tensor) -> Tensor:
        """Compute the loss of pairs with these margins, float[any]."""
        match self.form:
            case "sigmoid":
                return dpo_loss(margins, self.beta, self.smoothing)
            case "ipo":
                return ipo_loss(margins, self.beta)
            case "hinge":
                return hinge_loss(margins, self.beta)


def dpo_loss(margins: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Compute DPO's logistic loss of margins h.

    `-(1 - smoothing) log sigmoid(beta h) - smoothing log sigmoid(-beta h)`. Takes float[any] and returns the same
    shape. Without smoothing it is DPO: Rafailov et al. 2023 (arXiv:2305.18290), equation 7. SPIN uses it too (Chen et
    al. 2024, arXiv:2401.01335, with the logistic loss), and calls beta lambda. With smoothing it is conservative DPO:
    Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO".
    """
    scaled = beta * margins
    zero = scaled.new_zeros(())
    loss = (-scaled).logaddexp(zero)
    return loss if not smoothing else (1 - smoothing) * loss + smoothing * scaled.logaddexp(zero)


def ipo_loss(margins: Tensor, beta: float) -> Tensor:
    """Compute IPO's squared distance of margins h from their target: `(h - 1 / (2 beta))^2`.

    Takes float[any] and returns the same shape. Azar et al. 2023 (arXiv:2310.12036), the sampled loss, whose tau is
    beta. As in the paper, margins are sums over tokens. Some implementations divide by the lengths.
    """
    return (margins - 1 / (2 * beta)).square()


def hinge_loss(margins: Tensor, beta: float) -> Tensor:
    """Compute the hinge loss of margins h, `max(0, 1 - beta h)`: a pair with a margin above `1 / beta` learns nothing.

    Takes float[any] and returns the same shape. SLiC's calibration loss on margins to a reference, as in Liu et al.
    2023 (arXiv:2309.06657), "hinge-norm".
    """
    return (1 - beta * margins).clamp(min=0)


class KtoLoss(NearReference):
    """The loss of KTO (arXiv:2402.01306), for single completions that are labelled good or bad.

    Reads `reference_logprobs`, `desirable` (bool, one for each row) and `kl`. `kl` has one number for each row, the
    same for all, which `mismatched_kl` estimates. `kto_utility` has the formula. Diagnostic: `utility`.
    """

    desirable: float = Field(default=1.0, ge=0)
    """Weight of good rows, lambda_D. Raise it if there are far fewer good rows than bad ones."""
    undesirable: float = Field(default=1.0, ge=0)
    """Weight of bad rows, lambda_U."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("reference_logprobs", "desirable", "kl", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token's row, float[tokens]."""
        log_ratios = _of_rows(logprobs - columns["reference_logprobs"], columns["rows"])
        desirable = columns["desirable"] > 0
        utility = kto_utility(log_ratios, columns["kl"], desirable, self.beta)
        weights = utility.new_full(utility.shape, self.undesirable).masked_fill(desirable, self.desirable)
        return TokenLoss(weights * (1 - utility), {"utility": utility.detach()})


def kto_utility(log_ratios: Tensor, kl: Tensor, desirable: Tensor, beta: float) -> Tensor:
    """Compute KTO's utility of rows: `sigmoid(beta (r - z))` for a desirable row, else `sigmoid(beta (z - r))`.

    `log_ratios` r and `kl` z are float[any], and `desirable` is bool. All have the same shape, which is that of the
    result. KTO's value v is the utility times the row's weight lambda, and its loss is the mean of `lambda - v`:
    Ethayarajh et al. 2024 (arXiv:2402.01306), L_KTO. No gradient goes through z.
    """
    gain = beta * (log_ratios - kl.detach())
    return gain.where(desirable, -gain).sigmoid()


def _of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Sum over the row of each token, float[tokens]."""
    return values.new_zeros(len(values)).index_add(0, rows, values)[rows]
