"""Weights: frozen tensors with a version."""

import copy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.errors import DataError
from meshrl.weights import Weights

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64]


def tensors(dtype: type = np.float32) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    return {"embed": np.arange(6).reshape(2, 3).astype(dtype), "scale": np.array(2).astype(dtype), "none": np.empty(0)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_weights_have_equal_fingerprints(dtype: type) -> None:
    one, two = Weights(3, tensors(dtype)), Weights(3, dict(reversed(tensors(dtype).items())))
    assert one == two
    assert one.fingerprint() == two.fingerprint() == one.fingerprint()
    assert len(one.fingerprint()) == 32
    assert one.tensors["scale"].shape == ()


@given(st.integers(0, 5), st.integers(0, 7))
def test_one_bit_changes_the_fingerprint(position: int, bit: int) -> None:
    changed = tensors()
    changed["embed"].reshape(-1).view(np.uint8)[position] ^= np.uint8(1 << bit)
    assert Weights(0, changed).fingerprint() != Weights(0, tensors()).fingerprint()


def test_names_dtypes_and_shapes_count() -> None:
    values = np.zeros(6, np.float32)
    different = [
        Weights(0, {"a": values}),
        Weights(0, {"b": values}),
        Weights(0, {"a": values.reshape(2, 3)}),
        Weights(0, {"a": np.zeros(6, np.int32)}),
        Weights(0, {"a": values[:3], "b": values[3:]}),
        Weights(0, {}),
    ]
    assert len({weights.fingerprint() for weights in different}) == len(different)


def test_a_version_is_part_of_the_value_and_not_of_the_fingerprint() -> None:
    one = Weights(1, tensors())
    two = one.with_version(2)
    assert two.version == 2
    assert two.fingerprint() == one.fingerprint()
    assert two != one
    assert two.with_version(1) == one
    assert two.tensors["embed"] is one.tensors["embed"]
    assert one != "weights"


def test_nothing_can_be_written() -> None:
    memory = np.zeros(4, np.float32)
    weights = Weights(0, {"view": memory[:2], "own": np.zeros(2)})
    memory[0] = 9
    assert weights.tensors["view"].tolist() == [0, 0]
    for array in weights.tensors.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        weights.tensors["own"] = memory  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    assert copy.deepcopy(weights) is weights


def test_size_repr_and_refusal() -> None:
    weights = Weights(4, tensors())
    assert weights.nbytes == 28
    assert repr(weights) == "Weights(version 4, 3 tensors, 28 bytes)"
    with pytest.raises(DataError, match="weight `names` has dtype <U1"):
        Weights(0, {"names": np.array(["a"])})
