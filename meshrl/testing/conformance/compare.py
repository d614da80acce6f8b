"""Compare results of two sides: equal bit for bit, or equal except for rounding."""

from collections.abc import Awaitable, Mapping
from typing import Final

import numpy as np

from meshrl.data import Batch, Metrics, Weights
from meshrl.errors import MeshrlError, RankFailed
from meshrl.mesh import Array
from meshrl.roles import Policy
from meshrl.testing.witness import PromiseBroken

TOLERANCE: Final = 1e-5
"""Largest difference of a number, relative to its size if that is above 1. Ranks, micro-batches and kernels add float32
numbers in different orders, with a relative error of 6e-8 per sum. Two layers and three steps make that 1e-7 to 1e-6.
The three steps move weights by 1e-2 and more, so that a mistake of a thousandth shows."""


def require(holds: bool, text: str) -> None:
    """Raise `PromiseBroken` unless the condition holds."""
    if not holds:
        raise PromiseBroken(text)


def close(what: str, found: Array, expected: Array, tolerance: float) -> None:
    """Require equal shapes, and numbers within the tolerance. Infinite values and NaN are never within it."""
    require(found.shape == expected.shape, f"{what} has shape {found.shape}, not {expected.shape}")
    one, other = found.astype(np.float64), expected.astype(np.float64)
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


def close_metrics(what: str, found: Metrics, expected: Metrics, tolerance: float) -> None:
    """Require equal names, and means within the tolerance."""
    names = sorted(found), sorted(expected)
    require(names[0] == names[1], f"{what} has {', '.join(names[0])}, and on the plain backend {', '.join(names[1])}")
    for name in expected:
        close(f"{what}: `{name}`", np.array(found[name]), np.array(expected[name]), tolerance)


def close_columns(what: str, found: Batch, expected: Batch, names: tuple[str, ...], tolerance: float) -> None:
    """Require token columns of equal rows, dtype and source, and values within the tolerance."""
    for name in names:
        one, other = found.ragged(name), expected.ragged(name)
        whole = f"{what}: `{name}`"
        same = one.lengths.tolist() == other.lengths.tolist()
        require(same, f"{whole} has rows of {one.lengths.tolist()} tokens, not {other.lengths.tolist()}")
        require(one.dtype == other.dtype, f"{whole} is {one.dtype}, not {other.dtype}")
        require(one.source == other.source, f"{whole} comes from {one.source}, not {other.source}")
        close(whole, one.values, other.values, tolerance)


def alike(what: str, found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Require equal names, shapes and dtypes."""
    shown = [{name: f"{array.dtype}{list(array.shape)}" for name, array in each.items()} for each in (found, expected)]
    wrong = sorted(name for name in shown[0].keys() | shown[1].keys() if shown[0].get(name) != shown[1].get(name))
    told = "; ".join(
        f"`{name}` is {shown[0].get(name, 'missing')}, not {shown[1].get(name, 'there')}" for name in wrong[:3]
    )
    require(not wrong, f"{what} differ from the plain backend's in {len(wrong)} tensors: {told}")


def close_weights(what: str, found: Weights, expected: Weights, tolerance: float) -> None:
    """Require equal version, names, shapes and dtypes, and values within the tolerance."""
    same = found.version == expected.version
    require(same, f"{what}: the weights are of version {found.version}, not {expected.version}")
    close_tensors(what, found.tensors, expected.tensors, tolerance)


def close_tensors(what: str, found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float) -> None:
    """Require equal names, shapes and dtypes, and values within the tolerance."""
    alike(f"{what}: the weights", found, expected)
    for name, array in expected.items():
        close(f"{what}: weight `{name}`", found[name], array, tolerance)


async def loaded(policy: Policy) -> Weights:
    """A policy's weights, loaded into this process."""
    return await (await policy.weights()).load()


async def refused(what: str, call: Awaitable[object], kind: type[MeshrlError], *words: str) -> None:
    """Require that a call fails with an error of this kind that contains these words, on a mesh or not."""
    try:
        await call
    except MeshrlError as error:
        cause = (error.__cause__ or error) if isinstance(error, RankFailed) else error
        told = f"{what} is refused with {type(cause).__name__}: {str(cause)[:300]}"
        require(isinstance(cause, kind), f"{told}\nwhich should be a {kind.__name__}")
        missing = [word for word in words if word not in str(cause)]
        require(not missing, f"{told}\nwhich does not say {', '.join(missing)}")
        return
    raise PromiseBroken(f"{what} is accepted: it should be a {kind.__name__}")
