"""Each loss is its paper's equation in float64, with the equation's gradient, however rows are divided."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import meshrl as rl
from meshrl.algo import Correction, Loss, TokenLoss, WithKl, token_weights
from meshrl.algo.policy_loss import sequence_ratios
from meshrl.algo.preference import pair_margins
from meshrl.data import Ragged

Floats: TypeAlias = NDArray[np.float64]
Equation: TypeAlias = Callable[[Floats], float]
"""What is minimised, of what the model predicts, float64[tokens]."""

# --- eight rows: what their tokens had from the sampler, the trainer and the reference, and what they have now

LENGTHS = (3, 1, 4, 2, 5, 1, 2, 3)
ROW = np.repeat(np.arange(8), LENGTHS)
PER_TOKEN = np.repeat(1 / np.array(LENGTHS), LENGTHS)
GROUPS = np.array([7, 3, 3, 7, 5, 5, 9, 9])
PREFERRED = np.array([1, -1, 1, -1, 0, 0, -1, 1])
PAIRS = [(0, 3), (2, 1), (7, 6)]
"""The rows of each pair, the preferred one first; rows 4 and 5 prefer neither."""
DESIRABLE = np.arange(8) % 3 == 0

_random = np.random.default_rng(7)
SAMPLER: Floats = -_random.exponential(1.0, len(ROW))
TRAINER: Floats = SAMPLER + _random.normal(0, 0.2, len(ROW))
POLICY: Floats = SAMPLER + _random.normal(0, 0.3, len(ROW))
REFERENCE: Floats = SAMPLER + _random.normal(0, 0.5, len(ROW))
ADVANTAGES: Floats = np.array([1.3, -0.4, -0.9, 0.7, -1.1, 0.2, 2.0, -0.3])[ROW]
OLD_VALUES, RETURNS, VALUES = _random.normal(0, 1, (3, len(ROW)))
LABELS = _random.choice([0.0, 0.25, 0.75, 1.0], len(ROW))
SCORES: Floats = np.array([0.3, -1.2, 2.0, 1.1, 0.5, -0.5, 3.0, -2.0])
LEAST: Floats = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2 / 3, 2 / 3])
BETA, KL_POINT = 0.3, 0.4


def of_rows(values: Floats) -> Floats:
    return np.bincount(ROW, values).astype(np.float64)


def sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)))


Columns: TypeAlias = dict[str, NDArray[Any]]
OF_TOKENS: Columns = {
    "sampler_logprobs": SAMPLER,
    "logprobs": TRAINER,
    "reference_logprobs": REFERENCE,
    "advantages": ADVANTAGES,
    "values": OLD_VALUES,
    "returns": RETURNS,
    "labels": LABELS,
    "desirable": DESIRABLE[ROW],
    "kl": np.full(len(ROW), KL_POINT),
}
OF_PAIRS: Columns = {"logprobs": POLICY, "preferred": PREFERRED[ROW]}
OF_PAIRS["margins"] = pair_margins(of_rows(POLICY - REFERENCE), GROUPS, PREFERRED)[ROW]
_PAIR = np.unique(GROUPS, return_inverse=True)[1]
OF_SCORED_PAIRS: Columns = {"token_scores": SCORES, "least_margins": LEAST, "preferred": PREFERRED}
OF_SCORED_PAIRS["margins"] = pair_margins(SCORES, GROUPS, PREFERRED)
OF_SCORED_PAIRS["pair_sums"] = np.bincount(_PAIR, SCORES)[_PAIR]


def surrogate(ratio: Floats, low: float, high: float) -> Floats:
    """PPO's, arXiv:1707.06347, equation 7."""
    return np.minimum(ratio * ADVANTAGES, np.clip(ratio, 1 - low, 1 + high) * ADVANTAGES)


def k3(policy: Floats) -> Floats:
    """DeepSeekMath, arXiv:2402.03300, equation 4."""
    return np.asarray(np.exp(REFERENCE) / np.exp(policy) - (REFERENCE - policy) - 1)


def k2(policy: Floats) -> Floats:
    """Schulman 2020."""
    return (REFERENCE - policy) ** 2 / 2


def ppo(policy: Floats) -> float:
    return -float(surrogate(np.exp(policy - SAMPLER), 0.2, 0.2).mean())


def grpo(policy: Floats) -> float:
    """`(1/G) sum_i (1/|o_i|) sum_t (min(...) - beta k3)`: arXiv:2402.03300, equation 3."""
    return -float(PER_TOKEN @ (surrogate(np.exp(policy - SAMPLER), 0.2, 0.2) - 0.1 * k3(policy)) / 8)


def dapo(policy: Floats) -> float:
    """`(1 / sum_i |o_i|) sum_i sum_t min(...)` with two bounds: arXiv:2503.14476, equation 12."""
    return -float(surrogate(np.exp(policy - SAMPLER), 0.1, 0.3).mean())


def dual_clip(policy: Floats) -> float:
    """`max(min(...), c A)` where A < 0: arXiv:1912.09729."""
    objective = surrogate(np.exp(policy - SAMPLER), 0.2, 0.2)
    return -float(np.where(ADVANTAGES < 0, np.maximum(objective, 1.1 * ADVANTAGES), objective).mean())


def dr_grpo(policy: Floats) -> float:
    """`(1/G) sum_i sum_t min(...)`, over a constant: arXiv:2503.20783."""
    return -float(surrogate(np.exp(policy - SAMPLER), 0.2, 0.2).sum() / (8 * 16))


def gspo(policy: Floats) -> float:
    """`(1/G) sum_i min(s_i A_i, clip(s_i) A_i)`, `s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|)`: arXiv:2507.18071, eq. 5."""
    ratio = (np.exp(of_rows(policy)) / np.exp(of_rows(SAMPLER))) ** (1 / np.array(LENGTHS))
    return -float(PER_TOKEN @ surrogate(ratio[ROW], 0.1, 0.05) / 8)


def weighed(weights: Floats) -> Equation:
    """The surrogate of the ratio to the trainer, each token's times its weight: decoupled PPO, arXiv:2110.00641."""
    return lambda policy: -float(weights @ surrogate(np.exp(policy - TRAINER), 0.2, 0.2) / len(ROW))


def reinforce(weights: Floats | float = 1.0) -> Equation:
    """`(1/N) sum_i A_i log pi(y_i)`: RLOO, arXiv:2402.14740; its tokens weighed, the weights held fixed."""
    return lambda policy: -float((weights * ADVANTAGES * policy).sum() / 8)


def cispo(weights: Floats) -> Equation:
    """`(1 / sum_i |o_i|) sum_i sum_t sg(r_t) A_i log pi(o_t)`: MiniMax-M1, arXiv:2506.13585."""
    return lambda policy: -float((weights * ADVANTAGES * policy).mean())


def pairs(of_margin: Callable[[float], float]) -> Equation:
    """The mean over four pairs, of which one prefers neither, of a function of `log pi/ref(w) - log pi/ref(l)`."""

    def equation(policy: Floats) -> float:
        ratios = of_rows(policy - REFERENCE)
        return sum(of_margin(float(ratios[chosen] - ratios[rejected])) for chosen, rejected in PAIRS) / 4

    return equation


def of_sigmoid(smoothing: float) -> Equation:
    """DPO, arXiv:2305.18290, equation 7, and conservative DPO."""

    def of_margin(margin: float) -> float:
        up, down = np.log(sigmoid(np.array([BETA * margin, -BETA * margin])))
        return -float((1 - smoothing) * up + smoothing * down)

    return pairs(of_margin)


def kto(policy: Floats) -> float:
    """The mean of `lambda - v`: arXiv:2402.01306, L_KTO."""
    ratios = of_rows(policy - REFERENCE)
    good = 1.5 - 1.5 * sigmoid(BETA * (ratios - KL_POINT))
    bad = 0.7 - 0.7 * sigmoid(BETA * (KL_POINT - ratios))
    return float(np.where(DESIRABLE, good, bad).mean())


def bradley_terry(centre: float) -> Equation:
    """`-log sigmoid(r_c - r_r - m)`: arXiv:2307.09288, equation 2; `centre (r_c + r_r)^2`: arXiv:2312.09244."""

    def equation(scores: Floats) -> float:
        chosen, rejected = np.array(PAIRS).T
        apart = -np.log(sigmoid(scores[chosen] - scores[rejected] - LEAST[chosen]))
        return float((apart + centre * (scores[chosen] + scores[rejected]) ** 2).sum() / 4)

    return equation


def steps(weights: Floats) -> Equation:
    """The cross-entropy of steps: arXiv:2312.08935, equation 2."""

    def equation(scores: Floats) -> float:
        chance = sigmoid(scores)
        return -float(weights @ (LABELS * np.log(chance) + (1 - LABELS) * np.log(1 - chance)))

    return equation


def value_error(values: Floats) -> float:
    """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`: openai/baselines, ppo2."""
    held = np.clip(values, OLD_VALUES - 0.4, OLD_VALUES + 0.4)
    return float(np.maximum((values - RETURNS) ** 2, (held - RETURNS) ** 2).mean() / 2)


AHEAD, APART = np.exp(POLICY - SAMPLER), np.exp(TRAINER - SAMPLER)
AHEAD_OF_ROWS = np.exp(of_rows(POLICY - SAMPLER))[ROW]


class Case(NamedTuple):
    loss: Loss
    equation: Equation
    predicted: Floats = POLICY
    columns: Columns = OF_TOKENS

    @property
    def row(self) -> NDArray[np.int64]:
        return ROW if len(self.predicted) == len(ROW) else np.arange(len(self.predicted))


def of_pairs(equation: Equation, **fields: Any) -> Case:
    return Case(rl.PreferenceLoss(beta=BETA, **fields), equation, columns=OF_PAIRS)


BY_ROW = Correction(level="sequence", high=1.2)
CASES = {
    "sft": Case(rl.CrossEntropy(), lambda policy: -float(policy.mean())),
    "ppo": Case(rl.ClippedLoss(clip=0.2), ppo),
    "ppo, k2": Case(
        rl.ClippedLoss(kl=0.1, kl_estimator="k2"), lambda policy: ppo(policy) + 0.1 * float(k2(policy).mean())
    ),
    "grpo": Case(rl.ClippedLoss(normalise="sequence-mean", kl=0.1), grpo),
    "dapo": Case(rl.ClippedLoss(clip=0.1, clip_high=0.3), dapo),
    "dual clip": Case(rl.ClippedLoss(dual_clip=1.1), dual_clip),
    "rows weighed": Case(
        rl.ClippedLoss(anchor="trainer", correction=BY_ROW),
        weighed(np.minimum(np.exp(of_rows(TRAINER - SAMPLER))[ROW], 1.2)),
    ),
    "tokens masked": Case(
        rl.ClippedLoss(anchor="trainer", correction=Correction(how="mask", low=0.9, high=1.1)),
        weighed(np.where(np.abs(APART - 1) <= 0.1, APART, 0)),
    ),
    "dr_grpo": Case(rl.ConstantLoss(constant=16), dr_grpo),
    "rloo": Case(rl.ReinforceLoss(), reinforce()),
    "rloo, tokens weighed": Case(rl.ReinforceLoss(correction=Correction(high=1.1)), reinforce(np.minimum(AHEAD, 1.1))),
    "rloo, rows weighed": Case(rl.ReinforceLoss(correction=BY_ROW), reinforce(np.minimum(AHEAD_OF_ROWS, 1.2))),
    "cispo": Case(rl.CispoLoss(clip_high=0.1), cispo(np.minimum(AHEAD, 1.1))),
    "cispo of two bounds": Case(rl.CispoLoss(clip=0.1, clip_high=0.1), cispo(np.clip(AHEAD, 0.9, 1.1))),
    "gspo": Case(rl.SequenceLoss(clip=0.1, clip_high=0.05), gspo),
    "dpo": of_pairs(of_sigmoid(0.0)),
    "conservative dpo": of_pairs(of_sigmoid(0.2), smoothing=0.2),
    "ipo": of_pairs(pairs(lambda margin: (margin - 1 / (2 * BETA)) ** 2), form="ipo"),
    "hinge": of_pairs(pairs(lambda margin: max(0.0, 1 - BETA * margin)), form="hinge"),
    "kto": Case(rl.KtoLoss(beta=BETA, desirable=1.5, undesirable=0.7), kto),
    "bradley_terry": Case(rl.BradleyTerryLoss(), bradley_terry(0.0), SCORES, OF_SCORED_PAIRS),
    "bradley_terry, centred": Case(rl.BradleyTerryLoss(centre=0.3), bradley_terry(0.3), SCORES, OF_SCORED_PAIRS),
    "steps": Case(rl.ProcessLoss(), steps(np.full(len(ROW), 1 / len(ROW))), VALUES),
    "steps, of texts": Case(rl.ProcessLoss(normalise="sequence-mean"), steps(PER_TOKEN / 8), VALUES),
    "critic": Case(rl.ValueLoss(), lambda values: float(((values - RETURNS) ** 2).mean() / 2), VALUES),
    "critic, clipped": Case(rl.ValueLoss(clip=0.4), value_error, VALUES),
}
# In one part, in parts of which none has a pair, and each row by itself.
DIVISIONS: Sequence[Sequence[Sequence[int]]] = ([range(8)], [[0, 1, 5], [2, 4, 6], [3, 7]], [[r] for r in range(8)])


def told(case: Case, part: Sequence[int] = range(8)) -> tuple[TokenLoss, torch.Tensor, NDArray[np.intp]]:
    at = np.flatnonzero(np.isin(case.row, part))
    predicted = torch.from_numpy(case.predicted[at]).requires_grad_()
    given = {name: torch.from_numpy(values[at].copy()) for name, values in case.columns.items()}
    given["rows"] = torch.from_numpy(np.unique(case.row[at], return_inverse=True)[1])
    return case.loss(predicted, {name: given[name] for name in case.loss.columns}), predicted, at


def trained(case: Case, division: Sequence[Sequence[int]]) -> tuple[float, Floats]:
    mask = Ragged.of([np.ones(length) for length in np.bincount(case.row)], np.bool_)
    loss, tokens = case.loss, len(case.row)
    weights = token_weights(mask, loss.normalise, tokens=tokens, rows=8, constant=loss.constant).astype(np.float64)
    total, gradient = 0.0, np.zeros(tokens)
    for part in division:
        found, predicted, at = told(case, part)
        value = found.values @ torch.from_numpy(weights[at])
        (gradient[at],) = torch.autograd.grad(value, predicted)
        total += value.item()
    return total, gradient


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_papers_equation_however_rows_are_divided(name: str) -> None:
    case = CASES[name]
    expected = case.equation(case.predicted)
    slopes = [
        (case.equation(case.predicted + step) - case.equation(case.predicted - step)) / 2e-6
        for step in np.eye(len(case.predicted)) * 1e-6
    ]
    assert np.count_nonzero(slopes)
    for division in DIVISIONS:
        value, gradient = trained(case, division)
        assert value == pytest.approx(expected, rel=1e-6), division
        np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-8, err_msg=str(division))


def test_diagnostics_have_no_gradient_and_the_kl_to_the_reference_is_added_with_its_weight() -> None:
    penalised = 0
    for name, case in CASES.items():
        plain, _, _ = told(case)
        assert not any(metric.requires_grad for metric in plain.metrics.values()), name
        if isinstance(case.loss, WithKl) and not case.loss.kl:
            loss = case.loss.model_copy(update={"kl": 0.5})
            found, _, _ = told(Case(loss, case.equation))
            assert not found.metrics["reference_kl"].requires_grad, name
            np.testing.assert_allclose(found.metrics["reference_kl"], k3(POLICY), rtol=1e-9, err_msg=name)
            torch.testing.assert_close(found.values - plain.values, 0.5 * found.metrics["reference_kl"])
            penalised += 1
    assert penalised > 5


def test_ratios_and_what_is_clipped_are_told_of_tokens_and_for_gspo_of_whole_rows() -> None:
    found = told(CASES["gspo"])[0].metrics
    mean = np.exp((of_rows(POLICY - SAMPLER) / LENGTHS)[ROW])
    np.testing.assert_allclose(found["ratio"], mean, rtol=1e-9)
    ratios = sequence_ratios(*map(torch.from_numpy, (POLICY, SAMPLER, ROW)))
    np.testing.assert_allclose(ratios, mean, rtol=1e-9)
    beyond = np.where(ADVANTAGES > 0, mean > 1.05, mean < 0.9)
    assert found["clip_fraction"].tolist() == beyond.tolist()
    assert 0 < beyond.sum() < len(beyond)
    found = told(CASES["cispo of two bounds"])[0].metrics
    np.testing.assert_allclose(found["ratio"], AHEAD, rtol=1e-9)
    assert found["clip_fraction"].tolist() == ((AHEAD > 1.1) | (AHEAD < 0.9)).tolist()


def test_how_far_the_trainer_is_from_the_sampler_is_told_and_nothing_is_corrected_where_they_agree() -> None:
    corrected = rl.ClippedLoss(anchor="trainer", correction=Correction(high=1.1))
    found = told(Case(corrected, ppo))[0].metrics
    np.testing.assert_allclose(found["sampler_ratio"], APART, rtol=1e-9)
    np.testing.assert_allclose(found["sampler_kl"], APART - 1 - np.log(APART), atol=1e-9)
    np.testing.assert_allclose(found["correction"], np.minimum(APART, 1.1), rtol=1e-9)
    np.testing.assert_allclose(found["correction_squared"], np.minimum(APART, 1.1) ** 2, rtol=1e-9)
    agreeing, _, _ = told(Case(corrected, ppo, columns={**OF_TOKENS, "logprobs": SAMPLER}))
    assert torch.equal(agreeing.values, told(CASES["ppo"])[0].values)
    assert not agreeing.metrics["correction_clipped"].any()


def test_drift_is_how_far_the_model_is_from_its_column() -> None:
    for name in ("dpo", "bradley_terry"):
        case = CASES[name]
        moved = Case(case.loss, case.equation, case.predicted + np.where(case.row % 2, 0.25, -0.5), case.columns)
        np.testing.assert_allclose(told(moved)[0].metrics["drift"], np.where(case.row % 2, 0.25, 0.5))
