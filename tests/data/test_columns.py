"""The columns of a batch: their kinds, what they refuse, and choosing rows and columns."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshrl.data import Batch, Column, Ragged
from meshrl.errors import DataError
from tests.data.test_batch import rollouts

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = rollouts()


def test_columns_are_read_by_kind() -> None:
    assert len(BATCH) == 4
    assert BATCH.names == ("prompt", "tokens", "loss_mask", "rewards", "groups")
    assert ("tokens" in BATCH, "token" in BATCH) == (True, False)
    assert BATCH["tokens"] is BATCH.tokens
    assert BATCH.rewards.dtype == np.float32
    assert BATCH.groups.tolist() == [0, 0, 1, 1]
    assert BATCH.loss_mask[1].tolist() == [False, True]
    assert BATCH.nbytes == 10 * 4 + 5 * 8 + 10 + 5 * 8 + 4 * 4 + 4 * 8
    columns = "prompt str, tokens ragged int32, loss_mask ragged bool, rewards float32, groups int64"
    assert repr(BATCH) == f"Batch(4 rows, 10 tokens: {columns})"
    assert repr(Batch.of(x=np.zeros((2, 3)), y=[1, "a"])) == "Batch(2 rows: x float64[3], y int/str)"
    assert repr(Batch({})) == "Batch(0 rows: no columns)"


def test_a_column_of_another_kind_or_name_is_told() -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: BATCH.sampler_logprobs, "no column `sampler_logprobs`: it has prompt, tokens"),
        (lambda: Batch({}).only("x"), "no column `x`: it has none"),
        (lambda: BATCH.row("prompt"), r"`prompt` is str, not a row column: read it with batch.objects\('prompt'\)"),
        (lambda: BATCH.ragged("rewards"), r"`rewards` is float32, not a token column: .* batch.row\('rewards'\)"),
        (lambda: BATCH.objects("tokens"), r"`tokens` is ragged int32, not Python .* batch.ragged\('tokens'\)"),
    ]
    for read, told in wrong:
        with pytest.raises(DataError, match=told):
            read()


def test_standard_columns_have_one_dtype() -> None:
    batch = Batch.of(
        rewards=np.array([0.5, 1.0]),
        groups=np.array([0, 1], np.int32),
        tokens=Ragged.of([[1], [2]], np.int64),
        sampler_logprobs=Ragged.of([[0.0], [-1.0]], np.float64),
        versions=Ragged.of([[0], [0]], np.int64),
    )
    found = [column.dtype.name for column in batch.columns.values() if not isinstance(column, tuple)]
    assert found == ["float32", "int64", "int32", "float32", "int32"]
    assert not batch.rewards.flags.writeable
    assert not batch.tokens.values.flags.writeable


def test_columns_that_cannot_be_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": np.array(1.0)}, "`x` is one number, 1.0"),
        ({"x": "text"}, "`x` is str: give a numpy array"),
        ({"tokens": [[1], [2]]}, r"`tokens` is list: give Ragged.of\(rows, np.int32\)"),
        ({"rewards": [1.0, 2.0]}, r"`rewards` is float: give np.array\(values, np.float32\)"),
        ({"rewards": Ragged.of([[1.0]], np.float32)}, "`rewards` is ragged float32: give np.array"),
        ({"groups": np.array([0.5])}, "`groups` is float64 and must be int64"),
        ({"loss_mask": Ragged.of([[1]], np.int32)}, "`loss_mask` is int32 and must be bool"),
    ]
    for columns, message in cases:
        with pytest.raises(DataError, match=message):
            Batch(columns)


def test_assign_only_and_drop() -> None:
    more = BATCH.assign(prompt=("a", "b", "c", "d"), advantages=np.ones(4))
    assert more.names == (*BATCH.names, "advantages")
    assert more.objects("prompt") == ("a", "b", "c", "d")
    assert more.tokens is BATCH.tokens
    assert BATCH.only("tokens", "prompt").names == ("tokens", "prompt")
    assert BATCH.drop("tokens", "loss_mask").names == ("prompt", "rewards", "groups")
    assert len(BATCH.only()) == 4
    with pytest.raises(DataError, match="did you mean `rewards`"):
        BATCH.drop("reward")


def test_select_by_number_or_mask() -> None:
    assert BATCH.select([3, 0, 0]).rewards.tolist() == [3, 0, 0]
    assert BATCH.select([-1]).objects("prompt") == ("prompt 3",)
    assert BATCH.select(BATCH.rewards > 1).tokens == Ragged.of([[30, 31, 32], [40, 41, 42, 43]], np.int32)
    assert len(BATCH.select([])) == 0
    assert BATCH.select([]).names == BATCH.names
    assert BATCH.select(range(4)).tokens is BATCH.tokens, "all rows in order are not copied"
    wrong: list[tuple[Any, str]] = [
        ([0, 4], r"no row 4 in 4 rows \(0 to 3"),
        ([-5], "no row -5 in 4 rows"),
        ([0.5], r"selected by float64\[1\]"),
        ([[1]], r"selected by int64\[1, 1\]"),
    ]
    for rows, message in wrong:
        with pytest.raises(DataError, match=message):
            BATCH.select(rows)
    with pytest.raises(DataError, match="repeated -1 times"):
        BATCH.repeat(-1)


def test_equality_is_of_names_kinds_dtypes_and_values() -> None:
    base = Batch.of(x=np.array([1.0, np.nan]))
    assert base == Batch.of(x=np.array([1.0, np.nan]))
    ragged, narrow = Ragged.of([[1.0], [np.nan]], np.float64), np.array([1.0, np.nan], np.float32)
    others: list[Column] = [np.array([1.0, 2.0]), narrow, (1.0, float("nan")), ragged]
    for other in others:
        assert base != Batch.of(x=other)
    assert base != Batch.of(y=np.array([1.0, np.nan]))
    assert base != "batch"
    assert Batch.of(x=[float("nan"), 1]) == Batch.of(x=[float("nan"), 1])
    assert Batch.of(x=["a", 1]) != Batch.of(x=["a", 2])
    assert Batch.of(x=[{"a": [float("nan")]}]) == Batch.of(x=[{"a": [float("nan")]}])
    for value in ({"b": [float("nan")]}, {"a": [1.0]}, {"a": [float("nan"), 1]}, [float("nan")], 1.0):
        assert Batch.of(x=[{"a": [float("nan")]}]) != Batch.of(x=[value])
