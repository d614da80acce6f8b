"""Compare results of two sides: equal bit for bit, or equal except for rounding."""

from collections.abc import Awaitable, Mapping
from typing import Final

import numpy as np

from meshrl.data import Batch, Metrics, Ragged, Weights
from meshrl.errors import MeshrlError, RankFailed
from meshrl.mesh import Array
from meshrl.roles import Policy, Reference
from meshrl.testing.invariant_checker import PromiseBroken, require

TOLERANCE: Final = 1e-5
"""Largest difference of a number, relative to its size if that is above 1. Ranks, micro-batches and kernels add float32
numbers in different orders, with a relative error of 6e-8 per sum. Two layers and three steps make that 1e-7 to 1e-6.
The three steps move weights by 1e-2 and more, so that a mistake of a thousandth shows."""


def equal(what: str, actual: object, expected: object) -> None:
    """Require that both are equal."""
    require(actual == expected, f"{what} is {actual!r}, not {expected!r}")


def close(what: str, actual: Array, expected: Array, tolerance: float) -> None:
    """Require equal shapes, and numbers within the tolerance. Infinite values and NaN are never within it."""
    equal(f"the shape of {what}", actual.shape, expected.shape)
    one, other = actual.astype(np.float64), expected.astype(np.float64)
    error = np.abs(one - other) / np.maximum(1, np.abs(other))
    bad = ~(error <= tolerance)
    if bad.any():
        worst = np.unravel_index(int(np.argmax(np.where(np.isfinite(error), error, np.inf))), error.shape)
        place = f"[{', '.join(map(str, worst))}]" if error.ndim else ""
        others = f", and so do {int(bad.sum()) - 1} more of {bad.size}" if bad.sum() > 1 else ""
        raise PromiseBroken(
            f"{what}{place} is {one[worst]:.8g}, and {other[worst]:.8g} on the plain backend: they differ by "
            f"{error[worst]:.2g}, but rounding explains at most {tolerance:g}{others}"
        )


def close_metrics(what: str, actual: Metrics, expected: Metrics, tolerance: float) -> None:
    """Require equal names, and means within the tolerance."""
    equal(f"{what}: the list of metrics", sorted(actual), sorted(expected))
    for name in expected:
        close(f"{what}: `{name}`", np.array(actual[name]), np.array(expected[name]), tolerance)


def close_columns(what: str, actual: Batch, expected: Batch, names: tuple[str, ...], tolerance: float) -> None:
    """Require token columns of equal rows, dtype and source, and values within the tolerance."""
    for name in names:
        one, other = actual.ragged(name), expected.ragged(name)
        whole = f"{what}: `{name}`"
        equal(f"{whole}, by the lengths of rows,", one.lengths.tolist(), other.lengths.tolist())
        equal(f"{whole}, by dtype and source,", (one.dtype, one.source), (other.dtype, other.source))
        close(whole, one.values, other.values, tolerance)


def alike(what: str, actual: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Require equal names, shapes and dtypes."""
    shown = [{name: f"{array.dtype}{list(array.shape)}" for name, array in each.items()} for each in (actual, expected)]
    wrong = sorted(name for name in shown[0].keys() | shown[1].keys() if shown[0].get(name) != shown[1].get(name))
    examples = [f"`{name}` is {shown[0].get(name, 'missing')}, not {shown[1].get(name, 'there')}" for name in wrong[:3]]
    require(not wrong, f"{what} differ from the plain backend's in {len(wrong)} tensors: {'; '.join(examples)}")


def close_weights(what: str, actual: Weights, expected: Weights, tolerance: float) -> None:
    """Require equal version, names, shapes and dtypes, and values within the tolerance."""
    equal(f"{what}: the weights' version", actual.version, expected.version)
    close_tensors(what, actual.tensors, expected.tensors, tolerance)


def close_tensors(what: str, actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float) -> None:
    """Require equal names, shapes and dtypes, and values within the tolerance."""
    alike(f"{what}: the weights", actual, expected)
    for name, array in expected.items():
        close(f"{what}: weight `{name}`", actual[name], array, tolerance)


async def loaded(policy: Policy) -> Weights:
    """A policy's weights, loaded into this process."""
    return await (await policy.weights()).load()


async def scores(policy: Policy, batch: Batch) -> Ragged:
    """A policy's log-probs of rows, at their temperatures."""
    return (await (await policy.logprobs(batch)).load()).ragged("logprobs")


async def reference_scores(reference: Reference, batch: Batch) -> Array:
    """A reference's log-probs of rows, float32[tokens]."""
    return (await (await reference.logprobs(batch)).load()).ragged("reference_logprobs").values


async def refused(what: str, call: Awaitable[object], kind: type[MeshrlError], *words: str) -> None:
    """Require that a call fails with an error of this kind that contains these words, on a mesh or not."""
    try:
        await call
    except MeshrlError as error:
        cause = (error.__cause__ or error) if isinstance(error, RankFailed) else error
        message = f"{what} is refused with {type(cause).__name__}: {str(cause)[:300]}"
        require(isinstance(cause, kind), f"{message}\nwhich should be a {kind.__name__}")
        missing = [word for word in words if word not in str(cause)]
        require(not missing, f"{message}\nwhich does not say {', '.join(missing)}")
        return
    raise PromiseBroken(f"{what} is accepted: it should be a {kind.__name__}")
