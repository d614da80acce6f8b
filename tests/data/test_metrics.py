"""Means that are divided last."""

import copy
import math

import pytest

from meshrl.data import Metrics
from meshrl.errors import DataError


def test_means_by_hand() -> None:
    parts = [Metrics.of(loss=(1.0, 1), lr=0.5), Metrics.of(loss=(0.0, 3), lr=(0.5, 1))]
    assert Metrics.mean(parts).means() == {"loss": 0.25, "lr": 0.5}, "a mean of means would be wrong"
    assert Metrics.mean(parts).entries["loss"] == (1.0, 4.0)
    lacking = [Metrics.of(a=(1, 2)), Metrics.of(b=(3, 4)), Metrics({})]
    assert Metrics.mean(lacking).means() == {"a": 0.5, "b": 0.75}
    assert Metrics.mean([]).means() == {}
    assert math.isnan(Metrics.of(loss=(0, 0))["loss"])
    metrics = Metrics({"a/b": (3, 2)})
    assert [type(number) for number in metrics.entries["a/b"]] == [float, float]
    assert metrics["a/b"] == 1.5


def test_either_or_both_and_names_that_are_wrong() -> None:
    both = Metrics.of(a=(1, 1)) | Metrics.of(b=(2, 1))
    assert both == Metrics.of(b=(2, 1), a=(1, 1))
    assert (list(both), len(both), "a" in both, "c" in both) == (["a", "b"], 2, True, False)
    for metrics, told in ((both, "no `x`: it has a, b"), (Metrics({}), "no `x`: it has no names")):
        with pytest.raises(DataError, match=told):
            _ = metrics["x"]


def test_metrics_cannot_change() -> None:
    given_entries = {"a": (1.0, 1.0)}
    metrics = Metrics(given_entries)
    given_entries["a"] = (9.0, 1.0)
    assert metrics["a"] == 1
    with pytest.raises(TypeError):
        metrics.entries["a"] = (9.0, 1.0)  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    assert copy.deepcopy(metrics) is metrics
    assert metrics != "metrics"
    assert repr(Metrics.of(loss=(1, 3))) == "Metrics(loss=0.333333)"
