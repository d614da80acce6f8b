"""Rewards that are unknown: NaN in `rewards`, and no learned token in `loss_mask`. An unknown reward is not a zero."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.data.batch import Batch
from meshrl.data.ragged import Ragged
from meshrl.errors import DataError, shortened

OnError: TypeAlias = Literal["mask", "zero", "stop"]
"""What becomes of a row that could not be judged. `mask`: its reward is unknown, so nothing is learned from it and it
does not count in its group. `zero`: its reward is 0. `stop`: the run ends with the error."""

OUTCOMES: Final[dict[OnError, str]] = {"mask": "no reward", "zero": "reward 0", "stop": "no reward and ends the run"}
"""What such a row gets, for messages."""


def with_rewards(batch: Batch, rewards: ArrayLike, errors: Sequence[str | None], on_error: OnError = "mask") -> Batch:
    """Add `rewards`, float32, and `reward_error`. Every backend's `score` returns this.

    `rewards` is float[rows], NaN where they are unknown. `errors` has the reason of each row that could not be judged,
    and None for others. `on_error` says what becomes of such a row, unless its reward is NaN already, as of a discarded
    one. With "mask" its reward is NaN, and its `loss_mask`, if the batch has one, becomes False. Raises DataError with
    "stop", if there is such a row.
    """
    values = np.array(rewards, np.float32)
    failed = [row for row, error in enumerate(errors) if error is not None and not np.isnan(values[row])]
    if on_error == "stop" and failed:
        of = f", of the prompt {shortened(batch.objects('prompt')[failed[0]])}," if "prompt" in batch else ""
        raise DataError(
            f"{batch.place(failed[0])}{of} has no reward: {errors[failed[0]]}. The run ends because of "
            'errors = "stop": "mask" learns nothing from such rows'
        )
    if on_error == "mask":
        values[failed] = np.nan
    return unlearned(batch.assign(rewards=values, reward_error=list(errors)), np.isnan(values))


def unlearned(batch: Batch, rows: NDArray[np.bool_]) -> Batch:
    """Set `loss_mask`, if the batch has it, to False in these rows, bool[rows]. It must be local if there are any."""
    if "loss_mask" not in batch or not rows.any():
        return batch
    mask = batch.loss_mask
    learned = np.asarray(mask.values, np.bool_) & ~np.repeat(rows, mask.lengths)
    return batch.assign(loss_mask=Ragged(learned, mask.offsets))


def known_mean(rewards: ArrayLike) -> float:
    """Return the mean of the rewards, float[any], that are known, not NaN. NaN if none is."""
    values = np.asarray(rewards)
    known = values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if known.size else float("nan")


def why_unknown(batch: Batch) -> str:
    """Say why no row of a step was judged. Empty if one was, or if the columns are remote."""
    if not len(batch) or "rewards" not in batch or "rewards" in batch.elsewhere or not np.isnan(batch.rewards).all():
        return ""
    reasons = batch.objects("reward_error") if "reward_error" in batch and "reward_error" not in batch.elsewhere else ()
    cause = next(filter(None, reasons), "their `rewards` are NaN: look at what computes them")
    return f"none of the {len(batch)} rows of a step was judged, so nothing can be learned from them: {cause}"
