"""The critic's loss against numbers worked out by hand and torch's autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Metrics
from meshrl.losses import Loss, TokenLoss, ValueLoss, explained_variance
from meshrl.losses.value import clipped_value_error


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def parameter(*values: float) -> torch.Tensor:
    return column(*values).requires_grad_()


def judge(loss: Loss, predicted: torch.Tensor) -> TokenLoss:
    """What a loss says of two tokens of old value 0 and return 1."""
    return loss(predicted, {"values": column(0, 0), "returns": column(1, 1)})


def test_a_value_stops_where_it_has_moved_towards_the_return_by_more_than_the_clip() -> None:
    # Of old values 0 and a return of 1: within the clip, beyond it, past the return, and beyond it the wrong way.
    predicted = parameter(0.1, 0.5, 3.0, -0.5)
    loss = clipped_value_error(predicted, column(0, 0, 0, 0), column(1, 1, 1, 1), 0.2)
    assert loss.tolist() == pytest.approx([0.405, 0.32, 2.0, 1.125])
    (slope,) = torch.autograd.grad(loss.sum(), predicted)
    assert slope.tolist() == pytest.approx([-0.9, 0.0, 2.0, -1.5])


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    predicted = parameter(0.5, -4.0)
    judged = judge(ValueLoss(), predicted)
    assert judged.values.tolist() == [0.125, 12.5]
    (slope,) = torch.autograd.grad(judged.values.sum(), predicted)
    assert slope.tolist() == [-0.5, -5.0]
    assert judged.metrics["value_clip_fraction"].tolist() == [0, 0]


def test_the_diagnostics_carry_no_gradient() -> None:
    judged = judge(ValueLoss(clip=0.2), parameter(0.1, 0.5))
    assert judged.metrics["value_error"].tolist() == pytest.approx([0.81, 0.25])
    assert judged.metrics["value_clip_fraction"].tolist() == [0, 1]
    assert not any(values.requires_grad for values in judged.metrics.values())


pairs = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=20)


@given(pairs, st.integers(0, 20))
def test_the_explained_variance_adds_up_over_parts(rows: list[tuple[float, float]], cut: int) -> None:
    def metrics(part: list[tuple[float, float]]) -> Metrics:
        values, returns = (column(*numbers) for numbers in zip(*part, strict=True))
        judged = ValueLoss()(values, {"values": values, "returns": returns})
        return Metrics({name: (float(each.sum()), len(part)) for name, each in judged.metrics.items()})

    found = explained_variance(Metrics.mean([metrics(part) for part in (rows[:cut], rows[cut:]) if part]))
    values, returns = np.array(rows).T
    if returns.std() > 0.1:
        assert found == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-6, abs=1e-6)


def test_equal_returns_have_no_variance_to_explain() -> None:
    equal = Metrics.of(value=(0.4, 4), value_error=(1.0, 4), **{"return": (0.4, 4), "return_squared": (0.04, 4)})
    assert math.isnan(explained_variance(equal))
