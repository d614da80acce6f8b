"""Frozen arrays, and token columns of one array a row."""

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Ragged, frozen
from meshrl.errors import DataError

LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=8)


@given(LISTS, st.data())
def test_rows_come_back_as_they_went_in_and_selected_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.of(rows, np.int32)
    assert len(ragged) == len(rows)
    assert [row.tolist() for row in ragged] == rows
    assert [ragged[i].tolist() for i in range(len(rows))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.values.shape == (sum(map(len, rows)),)
    assert ragged.dtype == np.int32
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    assert ragged.select(np.array(picks, np.int64)) == Ragged.of([rows[i] for i in picks], np.int32)


def test_values_may_have_more_dims() -> None:
    ragged = Ragged.of([np.ones((2, 3)), [], np.zeros((1, 3))], np.float32)
    assert ragged.values.shape == (3, 3)
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert ragged[-1].tolist() == [[0, 0, 0]]
    assert repr(ragged) == "Ragged(3 rows, float32[3, 3])"
    with pytest.raises(DataError, match="differ past their first dim"):
        Ragged.of([np.ones((2, 3)), np.ones((2, 4))], np.float32)


def test_offsets_and_rows_that_do_not_fit_are_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        ([1, 3], "run from 1 to 3 over 3 tokens"),
        ([0, 2, 1, 3], "never fall"),
        ([], "starting at 0"),
        ([0.0, 3.0], "float64"),
        ([[0, 3]], r"int64\[1, 2\]"),
    ]
    for offsets, message in wrong:
        with pytest.raises(DataError, match=message):
            Ragged(np.zeros(3), offsets)
    with pytest.raises(DataError, match="row 1 of a ragged column is the number 7"):
        Ragged.of([[1], 7], np.int32)
    for row in (2, -3):
        with pytest.raises(IndexError, match=f"row {row} of a ragged column of 2 rows"):
            _ = Ragged.of([[1], [2, 3]], np.int32)[row]
    with pytest.raises(DataError, match="one number"):
        Ragged(np.array(7), [0])


def test_equality_is_of_dtype_lengths_and_values() -> None:
    ragged = Ragged.of([[1.0, np.nan], []], np.float32)
    assert ragged == Ragged.of([[1.0, np.nan], []], np.float32)
    assert ragged != Ragged.of([[1.0, np.nan], []], np.float64)
    assert ragged != Ragged.of([[1.0], [np.nan]], np.float32)
    assert ragged != Ragged.of([[2.0, np.nan], []], np.float32)
    assert ragged != "ragged"


def test_nothing_can_be_written() -> None:
    ragged = Ragged.of([[1, 2], [3]], np.int32)
    for array in (ragged.values, ragged.offsets, ragged[0], next(iter(ragged)), ragged.select(np.arange(1)).values):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    assert copy.deepcopy(ragged) is ragged


def test_what_somebody_can_write_is_copied_and_nothing_else() -> None:
    mine = np.arange(3)
    kept = frozen(mine)
    assert kept is mine
    with pytest.raises(ValueError, match="read-only"):
        mine[0] = 9
    assert frozen(kept[1:]).base is mine, "a view of a frozen array is taken as it is"
    raw = np.arange(4).tobytes()
    assert np.shares_memory(frozen(np.frombuffer(raw, np.int64)), np.frombuffer(raw, np.uint8))

    mine = np.arange(6)
    read_only = mine[:3]
    read_only.flags.writeable = False
    for view in (mine[:3], mine[::2], mine.reshape(2, 3), read_only):
        kept = frozen(view)
        assert not np.shares_memory(kept, mine)
        assert not kept.flags.writeable
        assert kept.flags.c_contiguous
    mine[0] = 9
    assert mine[0] == 9


def test_numbers_of_every_width_become_plain_arrays_and_other_dtypes_are_refused() -> None:
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    assert type(frozen(masked)) is np.ndarray
    swapped = frozen(np.array([1, 2], ">i4"))
    assert (swapped.dtype.isnative, swapped.tolist()) == (True, [1, 2])
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.complex64, bool):
        assert frozen(np.ones(2, dtype)).dtype == dtype
    for array in (np.array(["text"]), np.array([None]), np.zeros(1, "M8[s]"), np.zeros(1, "i4,i4")):
        with pytest.raises(DataError, match=r"column `x` has dtype .* tuple or list"):
            frozen(array, "column `x`")
