"""The numbers of a batch of rollouts for metrics."""

from typing import Final

import numpy as np

from meshrl.algo import effective_sample_size
from meshrl.data import Batch, Metrics
from meshrl.errors import DataError

_MEANS: Final = {"turns": "turns", "truncated": "truncated", "tries": "tries", "conversation_count": "conversations"}
"""Columns whose mean is reported, and the metric's name."""


def corrected(metrics: Metrics) -> dict[str, float]:
    """Statistics of an importance-sampling correction."""
    if "correction" in metrics and "correction_squared" in metrics and "effective_sample_size" not in metrics:
        return {"effective_sample_size": effective_sample_size(metrics)}
    return {}


def _signal(batch: Batch) -> dict[str, float]:
    """The share of groups in which all rewards are equal, which give no signal to learn from."""
    if "groups" not in batch:
        return {}
    _, group, counts = np.unique(batch.row("groups"), return_inverse=True, return_counts=True)
    most, least = np.full(len(counts), -np.inf), np.full(len(counts), np.inf)
    np.maximum.at(most, group, batch.rewards)
    np.minimum.at(least, group, batch.rewards)
    several = counts > 1
    return {"zero_std_groups": float((most == least)[several].mean())} if several.any() else {}


async def statistics(batch: Batch, *, worked: bool = False) -> dict[str, float]:
    """Compute the metrics of a batch of rollouts. Token columns that lie on ranks stay there.

    Raises DataError if the reward failed on every row, because there is nothing to learn from. With `worked`, meaning
    that programs have succeeded before, all may fail for a while, such as when one of their tools is down.
    """
    rewards = [name for name in batch.names if name.startswith("reward_") and name != "reward_error"]
    watched = ("rewards", "groups", "reward_error", "staleness", *_MEANS, *rewards)
    if names := [name for name in watched if name in batch]:
        batch = await batch.load(*names)
    found: dict[str, float] = {"rows": len(batch), "tokens": float(batch.lengths.sum())}
    if "loss_mask" in batch and "loss_mask" not in batch.elsewhere and len(batch):
        found["completion_tokens"] = float(batch.loss_mask.values.sum()) / len(batch)
    elif "versions" in batch and "versions" not in batch.elsewhere and len(batch):  # episodes have no other tokens
        found["completion_tokens"] = float((np.asarray(batch.versions.values, np.int32) >= 0).sum()) / len(batch)
    if "rewards" in batch and len(batch):
        found["reward"] = float(batch.rewards.mean())
        found |= _signal(batch)
        found |= {f"reward/{name.removeprefix('reward_')}": float(batch.row(name).mean()) for name in rewards}
    if len(batch):
        found |= {told: float(batch.row(name).mean()) for name, told in _MEANS.items() if name in batch}
    if "staleness" in batch and len(batch):
        versions = batch.row("staleness")
        found |= {"staleness": float(versions.mean()), "staleness_max": float(versions.max())}
    if "reward_error" in batch:
        errors = [error for error in batch.objects("reward_error") if error is not None]
        if errors and len(errors) == len(batch) and not (worked and "conversation_count" in batch):
            raise DataError(
                f"the reward raised on each of the {len(batch)} rows of a step, so nothing can be learned from them: "
                f"{errors[0]}. A warning above says where"
            )
        found["reward_errors"] = float(len(errors))
    return found
