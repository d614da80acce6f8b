"""Checks of a reward model: its scores and its training equal the plain backend's, and `Reward` can load it."""

from typing import Final

import numpy as np

from meshrl.algo import BradleyTerryLoss, ClippedLoss, ProcessLoss, score_columns, with_labels
from meshrl.data import Batch, Metrics
from meshrl.errors import DataError, MeshrlError
from meshrl.roles import RewardModel
from meshrl.testing.conformance.compare import (
    alike,
    close,
    close_columns,
    close_metrics,
    close_tensors,
    refused,
    require,
)
from meshrl.testing.conformance.material import tensors_of
from meshrl.testing.conformance.subject import OPTIMIZER, Check, Trial

_PAIRS: Final = Batch.of(
    prompt=[text for text in ("abc>", "h>", "gfe>", "abc>", "d>") for _ in range(2)],
    completion=["cba", "abc", "h", "", "efggggggggg", "gfe", "ccc", "cba", "d", "d"],
    answer=[text for text in ("cba", "h", "efg", "cba", "d") for _ in range(2)],
    groups=np.repeat(np.arange(5), 2),
    preferred=np.array([1, -1, 1, -1, -1, 1, -1, 1, 0, 0], np.int8),
    least_margins=np.repeat(np.array([0, 1, 0.5, 0, 0], np.float32), 2),
)
"""Two pairs of one prompt, and one without a preference."""

_STEPS: Final = Batch.of(
    prompt=["abc>", "h>", "abc>"],
    steps=[("c", "ba"), ("h",), ("cb", "a", "ggggggg")],
    step_labels=[(1.0, 0.0), (1.0,), (1.0, 0.5, 0.0)],
)

_SCHEDULED: Final = OPTIMIZER.model_copy(update={"schedule": "cosine", "total_steps": 6})


async def reward_model_encodings(trial: Trial) -> None:
    """`encode` returns the plain backend's tokens and mask, of pairs and of steps, in the order of the rows."""
    own, plain = await trial.reward_models()
    for batch in (_PAIRS, _PAIRS.select([1]), _PAIRS.select([]), _STEPS):
        found, expected = await (await own.encode(batch)).load(), await plain.encode(batch)
        for name in ("tokens", "loss_mask"):
            one, other = ([each.tolist() for each in side.ragged(name)] for side in (found, expected))
            require(one == other, f"`{name}` of {len(batch)} rows is {one}, and the plain backend's {other}")


async def reward_model_updates(trial: Trial) -> None:
    """Four updates of pairs and steps give the plain backend's metrics, scores and weights. The saved folder scores."""
    models = await trial.reward_models(micro_batch_tokens=20)
    await _same_scores("a new reward model", trial, models)
    for number, rows in enumerate(([*range(10)], [2, 3], [*range(10)])):
        loss = BradleyTerryLoss(centre=0.1 * number)
        told, wanted = [await _learned(model, _PAIRS.select(rows), loss) for model in models]
        close_metrics(f"update {number} of the reward model", told, wanted, trial.tolerance)
    told, wanted = [
        await model.update(await with_labels(await model.encode(_STEPS)), ProcessLoss()) for model in models
    ]
    close_metrics("an update of steps", told, wanted, trial.tolerance)
    await _same_scores("the reward model after four updates", trial, models)
    folders = [trial.folder / "own", trial.folder / "plain"]
    for model, folder in zip(models, folders, strict=True):
        await model.save(str(folder))
    found, expected = map(tensors_of, folders)
    alike("the saved tensors", found, expected)
    close_tensors("the saved reward model", found, expected, trial.tolerance)
    again = await trial.plain.reward_model(model=str(folders[0]))
    await _same_scores("a reward model of the saved folder", trial, (models[0], again))


async def a_reward_model_goes_on(trial: Trial) -> None:
    """A restored reward model continues bit for bit. A policy refuses its checkpoint, and is unchanged."""
    model = await trial.own.reward_model(optimizer=_SCHEDULED)
    for _ in range(2):
        await _learned(model, _PAIRS, BradleyTerryLoss())
    folder = str(trial.folder / "state")
    await model.checkpoint(folder)
    expected = await _goes_on(model)
    again = await trial.own.reward_model(optimizer=_SCHEDULED)
    await again.restore(folder)
    found = await _goes_on(again)
    require(found == expected, "a restored reward model continues with other scores or metrics")
    policy = await trial.own.policy()
    await refused("the checkpoint of a reward model", policy.restore(folder), MeshrlError, folder)
    await trial.standard(policy)


async def what_a_reward_model_refuses(trial: Trial) -> None:
    """A policy's loss or a missing column ends an update on all ranks, and changes nothing."""
    model, other = [await trial.own.reward_model() for _ in range(2)]
    batch = await model.encode(_PAIRS)
    await refused("a policy's loss", model.update(batch, ClippedLoss()), DataError, "this is a reward model")
    await refused("pairs without scores", model.update(batch, BradleyTerryLoss()), DataError, "token_scores")
    found, expected = await _goes_on(model), await _goes_on(other)
    require(found == expected, "the update after a refused one is not that of an undisturbed reward model")


async def _learned(model: RewardModel, batch: Batch, loss: BradleyTerryLoss) -> Metrics:
    return await model.update(await score_columns(await model.token_scores(await model.encode(batch))), loss)


async def _goes_on(model: RewardModel) -> tuple[dict[str, float], bytes]:
    """An update's metrics, and the scores after it."""
    metrics = await _learned(model, _PAIRS, BradleyTerryLoss())
    scored = await (await model.score(_PAIRS)).load("rewards")
    return metrics.means(), scored.rewards.tobytes()


async def _same_scores(what: str, trial: Trial, models: tuple[RewardModel, RewardModel]) -> None:
    for batch in (_PAIRS, _PAIRS.select([3]), _PAIRS.select([]), _STEPS):
        found, expected = [await (await model.token_scores(await model.encode(batch))).load() for model in models]
        close_columns(f"{what}, {len(batch)} rows", found, expected, ("token_scores",), trial.tolerance)
    found_rewards, expected_rewards = [(await (await model.score(_PAIRS)).load("rewards")).rewards for model in models]
    close(f"{what}: `rewards`", found_rewards, expected_rewards, trial.tolerance)


CHECKS: Final[tuple[Check, ...]] = (
    reward_model_encodings,
    reward_model_updates,
    a_reward_model_goes_on,
    what_a_reward_model_refuses,
)
"""The checks of a reward model."""
