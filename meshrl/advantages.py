"""Advantages: how much better a completion is than the others of its prompt."""

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.errors import DataError

Scale: TypeAlias = Literal["std", "none"]
"""Whether group advantages are divided by the group's standard deviation."""


def group_advantages(
    rewards: ArrayLike, groups: ArrayLike, *, scale: Scale = "std", epsilon: float = 1e-6
) -> NDArray[np.float32]:
    """Each reward less the mean of its group, over the group's standard deviation unless `scale="none"`.

    `rewards` float[rows], `groups` int[rows]: rows with the same number are completions of one prompt; they
    need not be adjacent, nor groups of one size. Returns float32[rows]. The deviation is the sample's
    (n - 1), with `epsilon` added to it; where all rewards of a group are equal, or it has one row, the
    advantages are 0. Raises DataError where the shapes differ or a reward is not finite.

    GRPO: DeepSeekMath (arXiv:2402.03300), section 4.1.2. `scale="none"`: Dr. GRPO (arXiv:2503.20783),
    section 3: the division favours prompts that are too easy or too hard.
    """
    values, group, counts = _grouped("group_advantages", rewards, groups)
    centred = values - (np.bincount(group, values) / counts)[group]
    if scale == "none":
        return centred.astype(np.float32)
    variance = np.bincount(group, centred**2) / np.maximum(counts - 1, 1)
    return (centred / (np.sqrt(variance) + epsilon)[group]).astype(np.float32)


def leave_one_out(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Each reward less the mean of the *other* rewards of its group.

    `rewards` float[rows], `groups` int[rows], in any order. Returns float32[rows]; a row alone in its group
    has no baseline and gets 0. Raises DataError where the shapes differ or a reward is not finite.

    `r_i - mean(r_j, j != i)`: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), REINFORCE Leave-One-Out.
    """
    values, group, counts = _grouped("leave_one_out", rewards, groups)
    sums = np.bincount(group, values)[group]
    others = counts[group] - 1
    baseline = (sums - values) / np.maximum(others, 1)
    return np.where(others > 0, values - baseline, 0.0).astype(np.float32)


def _grouped(
    name: str, rewards: ArrayLike, groups: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The rewards less the first of their group, float64[rows]; each row's group, from 0; each group's size.

    Advantages do not change with what a group's rewards have in common, and so equal rewards give exactly 0.
    """
    values, labels = np.asarray(rewards, np.float64), np.asarray(groups)
    if values.ndim != 1 or values.shape != labels.shape:
        raise DataError(
            f"{name}: rewards have shape {values.shape} and groups {labels.shape}; "
            "both must be [rows], one reward and one group a row."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise DataError(
            f"{name}: {len(bad)} of {len(values)} rewards are not finite; the first is {values[bad[0]]} "
            f"in row {bad[0]}. Give such rows a reward, or drop them with batch.select."
        )
    _, first, group, counts = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    return values - values[first][group], group.astype(np.int64), counts.astype(np.int64)
