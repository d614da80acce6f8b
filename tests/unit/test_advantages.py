"""Advantages against numbers worked out by hand and their defining properties."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshrl.advantages import group_advantages, leave_one_out
from meshrl.errors import DataError

Advantages: TypeAlias = Callable[[list[float], list[int]], NDArray[np.float32]]

rewards = st.floats(-10, 10, width=32)
batches = st.lists(st.tuples(rewards, st.integers(-3, 3)), min_size=1, max_size=40)


def columns(rows: list[tuple[float, int]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    values, groups = zip(*rows, strict=True)
    return np.array(values, np.float32), np.array(groups, np.int64)


def test_group_advantages_by_hand() -> None:
    # Group 7: 1, 0, 0, of mean 1/3 and deviation sqrt(1/3). Group 2: 5, 3, of mean 4 and deviation sqrt(2).
    found = group_advantages([1, 5, 0, 3, 0], [7, 2, 7, 2, 7])
    deviation = 3**-0.5
    expected = [2 / 3 / deviation, 2**-0.5, -1 / 3 / deviation, -(2**-0.5), -1 / 3 / deviation]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_without_division_only_the_mean_is_taken_away() -> None:
    found = group_advantages([1, 5, 0, 3, 0], [7, 2, 7, 2, 7], scale="none")
    np.testing.assert_allclose(found, [2 / 3, 1, -1 / 3, -1, -1 / 3], rtol=1e-6)


def test_epsilon_is_added_to_the_deviation() -> None:
    np.testing.assert_allclose(group_advantages([0, 2], [0, 0], epsilon=1.0), [-0.41421356, 0.41421356])


def test_leave_one_out_by_hand() -> None:
    found = leave_one_out([1, 5, 0, 3, 0], [7, 2, 7, 2, 7])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [1, 2, -0.5, -2, -0.5])


def test_equal_rewards_and_rows_alone_get_exactly_zero() -> None:
    values, groups = [0.1, 0.1, 0.1, 0.7], [0, 0, 0, 1]
    assert group_advantages(values, groups).tolist() == [0] * 4
    assert group_advantages(values, groups, scale="none").tolist() == [0] * 4
    assert leave_one_out(values, groups).tolist() == [0] * 4


def test_no_rows_give_no_advantages() -> None:
    assert len(group_advantages(np.zeros(0), np.zeros(0, np.int64))) == 0
    assert len(leave_one_out(np.zeros(0), np.zeros(0, np.int64))) == 0


@given(batches)
def test_each_group_sums_to_zero(rows: list[tuple[float, int]]) -> None:
    values, groups = columns(rows)
    for found in (
        group_advantages(values, groups),
        group_advantages(values, groups, scale="none"),
        leave_one_out(values, groups),
    ):
        assert np.isfinite(found).all()
        for group in np.unique(groups):
            assert float(found[groups == group].sum()) == pytest.approx(0, abs=1e-3)


@given(batches, st.data())
def test_the_order_of_rows_does_not_matter(rows: list[tuple[float, int]], data: st.DataObject) -> None:
    values, groups = columns(rows)
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    np.testing.assert_allclose(
        group_advantages(values, groups)[order], group_advantages(values[order], groups[order]), atol=1e-3
    )
    np.testing.assert_allclose(
        leave_one_out(values, groups)[order], leave_one_out(values[order], groups[order]), atol=1e-4
    )


@given(batches)
def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one(rows: list[tuple[float, int]]) -> None:
    values, groups = columns(rows)
    counts = np.array([(groups == group).sum() for group in groups])
    factor = np.where(counts > 1, counts / np.maximum(counts - 1, 1), 0)
    centred = group_advantages(values, groups, scale="none")
    np.testing.assert_allclose(leave_one_out(values, groups), centred * factor, atol=1e-4)


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out])
def test_wrong_shapes_and_wrong_rewards_are_refused_in_words(advantages: Advantages) -> None:
    with pytest.raises(DataError, match=r"rewards have shape \(3,\) and groups \(2,\)"):
        advantages([1.0, 2.0, 3.0], [0, 0])
    with pytest.raises(DataError, match=r"2 of 3 rewards are not finite; the first is nan in row 1"):
        advantages([1.0, np.nan, np.inf], [0, 0, 0])
