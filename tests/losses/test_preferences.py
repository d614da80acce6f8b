"""Losses of preferences against the papers' equations in float64, and their pairs over any division of the rows."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.config import validate
from meshrl.data import Ragged
from meshrl.errors import ConfigError
from meshrl.losses import KtoLoss, Loss, PairForm, PreferenceLoss, token_weights
from meshrl.objectives import pair_margins

Floats = NDArray[np.float64]

BETA = 0.3
GROUPS = np.array([7, 3, 3, 7, 5, 5, 9, 9])
PREFERRED = np.array([1, -1, 1, -1, 0, 0, -1, 1])
PAIRS = [(0, 3), (2, 1), (7, 6)]
"""The rows of each pair, the preferred one first; rows 4 and 5 prefer neither."""


def sigmoid(values: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.asarray(values, np.float64))))


FORMS: dict[str, tuple[PairForm, float, Callable[[float], float]]] = {
    "dpo": ("sigmoid", 0.0, lambda h: -float(np.log(sigmoid(BETA * h)))),
    "conservative dpo": (
        "sigmoid",
        0.2,
        lambda h: -float(0.8 * np.log(sigmoid(BETA * h)) + 0.2 * np.log(sigmoid(-BETA * h))),
    ),
    "ipo": ("ipo", 0.0, lambda h: (h - 1 / (2 * BETA)) ** 2),
    "hinge": ("hinge", 0.0, lambda h: max(0.0, 1 - BETA * h)),
}
"""Each form and its equation of one pair's margin."""


class Rows:
    """Log-probs of 8 rows of 1 to 5 learned tokens under a policy and a reference, float64."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.lengths = rng.integers(1, 6, 8)
        self.row = np.repeat(np.arange(8), self.lengths)
        self.policy, self.reference = rng.normal(-2, 1, (2, len(self.row)))
        self.columns = {
            "logprobs": self.policy,
            "reference_logprobs": self.reference,
            "margins": pair_margins(self.ratios(self.policy), GROUPS, PREFERRED)[self.row],
            "preferred": PREFERRED[self.row],
            "desirable": (np.arange(8) % 3 == 0)[self.row],
            "kl": np.full(len(self.row), 0.4),
        }

    def ratios(self, logprobs: Floats) -> Floats:
        return np.array([(logprobs - self.reference)[self.row == row].sum() for row in range(8)])

    def trained(self, loss: Loss, parts: Sequence[Sequence[int]]) -> tuple[float, Floats]:
        """The loss and its gradient by the log-probs, from micro-batches of these rows."""
        mask = Ragged.of([np.ones(length, np.bool_) for length in self.lengths], np.bool_)
        weights = token_weights(mask, loss.normalise, tokens=len(self.row), rows=8).astype(np.float64)
        whole = torch.from_numpy(self.policy.copy()).requires_grad_()
        total = 0.0
        for part in parts:
            at = np.flatnonzero(np.isin(self.row, part))
            columns: dict[str, Tensor] = {
                name: torch.from_numpy(values[at].copy()) for name, values in self.columns.items()
            }
            columns["rows"] = torch.from_numpy(np.unique(self.row[at], return_inverse=True)[1])
            value = loss(whole[torch.from_numpy(at)], columns).values @ torch.from_numpy(weights[at])
            value.backward()
            total += value.item()
        assert whole.grad is not None
        return total, whole.grad.numpy()

    def slopes(self, equation: Callable[[Floats], float]) -> Floats:
        """The gradient of a function of the rows' log-ratios by each token's log-prob, by central differences."""
        found = np.zeros(len(self.row))
        for token in range(len(self.row)):
            step = np.zeros(len(self.row))
            step[token] = 1e-5
            above, below = (self.ratios(self.policy + sign * step) for sign in (1, -1))
            found[token] = (equation(above) - equation(below)) / 2e-5
        return found


DIVISIONS: dict[str, Sequence[Sequence[int]]] = {
    "whole": [range(8)],
    "pairs apart": [[0, 1, 5], [2, 4, 6], [3, 7]],
    "rows alone": [[row] for row in range(8)],
}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", FORMS)
def test_pairs_give_their_equation_and_its_gradient_however_rows_are_divided(name: str, division: str) -> None:
    form, smoothing, of_margin = FORMS[name]
    rows = Rows()

    def equation(ratios: Floats) -> float:
        """The mean over four pairs, of which one prefers neither."""
        return sum(of_margin(float(ratios[chosen] - ratios[rejected])) for chosen, rejected in PAIRS) / 4

    value, gradient = rows.trained(PreferenceLoss(beta=BETA, form=form, smoothing=smoothing), DIVISIONS[division])
    assert value == pytest.approx(equation(rows.ratios(rows.policy)), rel=1e-6)
    np.testing.assert_allclose(gradient, rows.slopes(equation), rtol=1e-5, atol=1e-8)
    assert np.abs(gradient[np.isin(rows.row, (4, 5))]).max() == 0


@pytest.mark.parametrize("division", DIVISIONS)
def test_kto_gives_its_equation_and_its_gradient(division: str) -> None:
    rows = Rows()
    desirable = np.arange(8) % 3 == 0

    def equation(ratios: Floats) -> float:
        """The mean of lambda - v; arXiv:2402.01306, with z0 = 0.4."""
        good = 1.5 - 1.5 * sigmoid(BETA * (ratios - 0.4))
        bad = 0.7 - 0.7 * sigmoid(BETA * (0.4 - ratios))
        return float(np.where(desirable, good, bad).mean())

    loss = KtoLoss(beta=BETA, desirable=1.5, undesirable=0.7)
    value, gradient = rows.trained(loss, DIVISIONS[division])
    assert value == pytest.approx(equation(rows.ratios(rows.policy)), rel=1e-6)
    np.testing.assert_allclose(gradient, rows.slopes(equation), rtol=1e-5, atol=1e-8)


def test_drift_is_how_far_the_policy_is_from_the_column() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    columns = {
        "logprobs": torch.tensor([-1.0, -2.5, -3.0]),
        "margins": torch.zeros(3),
        "preferred": torch.tensor([1, 1, -1]),
        "rows": torch.tensor([0, 0, 1]),
    }
    found = PreferenceLoss()(logprobs, columns)
    assert found.metrics["drift"].tolist() == [0.0, 0.5, 0.0]
    assert not found.metrics["drift"].requires_grad


def test_margins_far_from_zero_stay_finite() -> None:
    margins = torch.tensor([-1e6, 1e6], dtype=torch.float64, requires_grad=True)
    loss = PreferenceLoss(beta=1.0, smoothing=0.1).of_margins(margins)
    assert loss.tolist() == pytest.approx([0.9e6, 0.1e6])
    loss.sum().backward()
    assert margins.grad is not None
    assert margins.grad.tolist() == pytest.approx([-0.9, 0.1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0: must be greater than 0"),
        ({"smoothing": 0.5}, "smoothing = 0.5: must be less than 0.5"),
        ({"form": "dpo"}, "form = 'dpo': must be 'sigmoid', 'ipo' or 'hinge'"),
        ({"form": "ipo", "smoothing": 0.1}, 'smoothing = 0.1 has no effect with form = "ipo": set form = "sigmoid"'),
    ],
)
def test_a_wrong_option_is_refused_in_words(table: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(PreferenceLoss, table, "file.toml")
