"""Losses of reward models against the papers' equations in float64, over any division of the rows."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl import Batch, score_columns
from meshrl.config import validate
from meshrl.data import Ragged
from meshrl.errors import ConfigError, DataError
from meshrl.losses import BradleyTerryLoss, CrossEntropy, Loss, ProcessLoss, ValueLoss, check_predicts, token_weights
from meshrl.objectives import pair_margins
from meshrl.roles import RewardTrainingConfig
from meshrl.testing import FakeRewardModel

Floats = NDArray[np.float64]

GROUPS = np.array([7, 3, 3, 7, 5, 5, 9, 9])
PREFERRED = np.array([1, -1, 1, -1, 0, 0, -1, 1])
PAIRS = [(0, 3), (2, 1), (7, 6)]
"""The rows of each pair, the preferred one first; rows 4 and 5 prefer neither."""
SCORES: Floats = np.array([0.3, -1.2, 2.0, 1.1, 0.5, -0.5, 3.0, -2.0])
LEAST: Floats = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2 / 3, 2 / 3])

DIVISIONS: dict[str, Sequence[Sequence[int]]] = {
    "whole": [range(8)],
    "pairs apart": [[0, 1, 5], [2, 4, 6], [3, 7]],
    "rows alone": [[row] for row in range(8)],
}


def trained(
    loss: Loss, scores: Floats, lengths: Sequence[int], columns: dict[str, Floats], parts: Sequence[Sequence[int]]
) -> tuple[float, Floats]:
    """The loss and its gradient by the scores, from micro-batches of these rows, each with so many scores."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    mask = Ragged.of([np.ones(length, np.bool_) for length in lengths], np.bool_)
    weights = token_weights(mask, loss.normalise, tokens=len(row), rows=len(lengths)).astype(np.float64)
    whole = torch.from_numpy(scores.copy()).requires_grad_()
    total = 0.0
    for part in parts:
        at = np.flatnonzero(np.isin(row, part))
        own: dict[str, Tensor] = {name: torch.from_numpy(columns[name][at].copy()) for name in loss.columns}
        value = loss(whole[torch.from_numpy(at)], own).values @ torch.from_numpy(weights[at])
        value.backward()
        total += value.item()
    assert whole.grad is not None
    return total, whole.grad.numpy()


def slopes(equation: Callable[[Floats], float], at: Floats) -> Floats:
    """The gradient by central differences."""
    steps = np.eye(len(at)) * 1e-5
    return np.array([(equation(at + step) - equation(at - step)) / 2e-5 for step in steps])


def pairs_of(scores: Floats) -> dict[str, Floats]:
    """What `score_columns` computes."""
    _, pair = np.unique(GROUPS, return_inverse=True)
    return {
        "token_scores": scores,
        "margins": pair_margins(scores, GROUPS, PREFERRED),
        "least_margins": LEAST,
        "pair_sums": np.bincount(pair, scores).astype(np.float64)[pair],
        "preferred": PREFERRED.astype(np.float64),
    }


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("centre", [0.0, 0.01, 0.3])
def test_pairs_give_the_bradley_terry_loss_and_its_gradient_however_rows_are_divided(
    centre: float, division: str
) -> None:
    def equation(scores: Floats) -> float:
        """The mean over four pairs, of which one prefers neither."""
        found = 0.0
        for chosen, rejected in PAIRS:
            apart = scores[chosen] - scores[rejected] - LEAST[chosen]
            found += -np.log(1 / (1 + np.exp(-apart))) + centre * (scores[chosen] + scores[rejected]) ** 2
        return found / 4

    loss = BradleyTerryLoss(centre=centre)
    value, gradient = trained(loss, SCORES, [1] * 8, pairs_of(SCORES), DIVISIONS[division])
    assert value == pytest.approx(equation(SCORES), rel=1e-6)
    np.testing.assert_allclose(gradient, slopes(equation, SCORES), rtol=1e-5, atol=1e-8)
    assert (gradient[[4, 5]] == 0).all()


class Scores(FakeRewardModel):
    """A reward model of known scores, each at the last of three tokens."""

    async def token_scores(self, batch: Batch) -> Batch:
        values = np.full((len(batch), 3), 9.0, np.float32)  # where nothing is scored the column is not read
        values[:, 2] = SCORES
        return batch.assign(token_scores=Ragged(values.reshape(-1), batch.loss_mask.offsets))


@pytest.mark.parametrize("centre", [0.0, 0.01])
async def test_what_with_scores_makes_of_pairs_gives_llama_2s_loss(centre: float) -> None:
    """The mean of `-log sigmoid(r_c - r_r - m)`, and `centre (r_c + r_r)^2`: arXiv:2307.09288, equation 2."""
    mask = Ragged.of([[False, False, True]] * 8, np.bool_)
    pairs = Batch.of(groups=GROUPS.copy(), preferred=PREFERRED.copy(), loss_mask=mask, least_margins=LEAST.copy())
    model = Scores(RewardTrainingConfig(model="none"))
    scored = await score_columns(await model.token_scores(pairs))
    other = [3, 2, 1, 0, 5, 4, 7, 6]
    assert scored.row("scores").tolist() == pytest.approx(SCORES.tolist())
    assert scored.row("pair_sums").tolist() == pytest.approx((SCORES + SCORES[other]).tolist())
    assert scored.row("margins").tolist() == pytest.approx((PREFERRED * (SCORES - SCORES[other])).tolist())
    assert (await score_columns(await model.token_scores(pairs.drop("least_margins")))).row(
        "least_margins"
    ).tolist() == [0.0] * 8

    apart = [SCORES[chosen] - SCORES[rejected] - LEAST[chosen] for chosen, rejected in PAIRS]
    sums = [SCORES[chosen] + SCORES[rejected] for chosen, rejected in PAIRS]
    expected = sum(np.log(1 + np.exp(-one)) + centre * both**2 for one, both in zip(apart, sums, strict=True)) / 4
    loss = BradleyTerryLoss(centre=centre)
    columns = {name: scored.row(name).astype(np.float64) for name in loss.columns if name != "token_scores"}
    columns["token_scores"] = scored.ragged("token_scores").values[2::3].astype(np.float64)
    value, _ = trained(loss, SCORES, [1] * 8, columns, [range(8)])
    assert value == pytest.approx(expected, rel=1e-6)


def test_scores_far_apart_give_finite_numbers() -> None:
    for far in (1e4, -1e4):
        scores = np.where(PREFERRED > 0, far, -far).astype(np.float64)
        value, gradient = trained(BradleyTerryLoss(), scores, [1] * 8, pairs_of(scores), [range(8)])
        assert np.isfinite([value, *gradient]).all()


def test_drift_is_how_far_the_model_has_moved() -> None:
    columns = {name: torch.from_numpy(values) for name, values in pairs_of(SCORES).items()}
    drift = BradleyTerryLoss()(torch.from_numpy(SCORES + 0.25), columns).metrics["drift"]
    np.testing.assert_allclose(drift.numpy(), 0.25)


LENGTHS = [3, 1, 2, 1]
STEPS: Floats = np.array([0.4, -2.0, 1.5, 0.1, -0.3, 3.0, -1.0])
LABELS: Floats = np.array([1.0, 0.0, 0.25, 1.0, 0.0, 0.75, 1.0])


@pytest.mark.parametrize("parts", [[range(4)], [[2], [0, 3], [1]]], ids=["whole", "divided"])
@pytest.mark.parametrize("normalise", ["token-mean", "sequence-mean"])
def test_steps_give_their_cross_entropy_and_its_gradient(normalise: str, parts: Sequence[Sequence[int]]) -> None:
    row = np.repeat(np.arange(4), LENGTHS)
    weights = {"token-mean": np.full(7, 1 / 7), "sequence-mean": 1 / (4 * np.array(LENGTHS)[row])}[normalise]

    def equation(scores: Floats) -> float:
        chance = 1 / (1 + np.exp(-scores))
        return float(-weights @ (LABELS * np.log(chance) + (1 - LABELS) * np.log(1 - chance)))

    loss = ProcessLoss.model_validate({"normalise": normalise})
    value, gradient = trained(loss, STEPS, LENGTHS, {"labels": LABELS}, parts)
    assert value == pytest.approx(equation(STEPS), rel=1e-6)
    np.testing.assert_allclose(gradient, slopes(equation, STEPS), rtol=1e-5, atol=1e-8)


def test_a_step_is_told_right_where_its_score_is_on_the_labels_side() -> None:
    told = ProcessLoss()(torch.from_numpy(STEPS), {"labels": torch.from_numpy(LABELS)}).metrics["accuracy"]
    assert told.tolist() == [1, 1, 0, 1, 1, 1, 0]
    nowhere = ProcessLoss()(torch.tensor([0.0, 0.0, torch.nan]), {"labels": torch.tensor([1.0, 0.0, 0.0])})
    assert nowhere.metrics["accuracy"].tolist() == [0, 0, 0]


def test_a_reward_model_takes_losses_of_scores_alone() -> None:
    for right in (BradleyTerryLoss(), ProcessLoss()):
        check_predicts(right, "scores")
    with pytest.raises(DataError, match="loss of `values`, which a critic predicts, but this is a reward model"):
        check_predicts(ValueLoss(), "scores")
    with pytest.raises(
        DataError, match=r"pass it to reward_model\.update, and .* such as ClippedLoss, to policy\.update"
    ):
        check_predicts(BradleyTerryLoss(), "logprobs")
    with pytest.raises(DataError, match=r"such as BradleyTerryLoss, to reward_model\.update"):
        check_predicts(CrossEntropy(), "scores")


def test_the_weight_of_the_centre_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="centre"):
        validate(BradleyTerryLoss, {"centre": -0.1}, "test")
