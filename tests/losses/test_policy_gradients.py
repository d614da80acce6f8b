"""REINFORCE, CISPO and GSPO against the papers' equations, written in numpy in float64, and their numeric gradients."""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshrl.config import validate
from meshrl.data import Ragged
from meshrl.errors import ConfigError
from meshrl.losses import (
    CispoLoss,
    ConstantLoss,
    Correction,
    Loss,
    ReinforceLoss,
    SequenceLoss,
    sequence_ratios,
    token_weights,
)

Array: TypeAlias = NDArray[np.float64]
Objective: TypeAlias = Callable[[Array, Array, Array], float]
"""What a paper maximises, of `logprobs`, `old` and `advantages`, each float64[tokens]."""

LENGTHS = (3, 1, 4)
ROW = np.repeat(np.arange(3), LENGTHS)
ENDS = np.cumsum(LENGTHS)[:-1]


def numbers(seed: int) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(seed)
    old = -random.exponential(1.0, len(ROW))
    return old + random.normal(0, 0.3, len(ROW)), old, np.array([1.3, -0.4, -0.9])[ROW]


def rows_of(values: Array) -> list[Array]:
    return np.split(values, ENDS)


def sequence_reinforce(logprobs: Array, old: Array, advantages: Array) -> float:
    """(1/N) sum_i A_i log pi(y_i): RLOO."""
    pairs = zip(rows_of(logprobs), rows_of(advantages), strict=True)
    return float(np.mean([row[0] * logs.sum() for logs, row in pairs]))


def weighted_reinforce(logprobs: Array, old: Array, advantages: Array, weights: Array) -> float:
    """(1/N) sum_i sum_t w_t A_i log pi(y_t), w held fixed."""
    return float((weights * advantages * logprobs).sum() / len(LENGTHS))


def cispo(logprobs: Array, old: Array, advantages: Array, weights: Array) -> float:
    """(1 / sum_i |o_i|) sum_i sum_t sg(r_t) A_i log pi(o_t): MiniMax-M1."""
    return float((weights * advantages * logprobs).mean())


def gspo(logprobs: Array, old: Array, advantages: Array) -> float:
    """(1/G) sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|): equation 5."""
    total = 0.0
    for logs, olds, row in zip(rows_of(logprobs), rows_of(old), rows_of(advantages), strict=True):
        ratio = (np.prod(np.exp(logs)) / np.prod(np.exp(olds))) ** (1 / len(logs))
        total += min(ratio * row[0], np.clip(ratio, 0.9, 1.05) * row[0])
    return float(total / len(LENGTHS))


def dr_grpo(logprobs: Array, old: Array, advantages: Array) -> float:
    """(1/G) sum_i sum_t min(r_t A_i, clip(r_t) A_i), over a constant: Dr. GRPO."""
    ratio = np.exp(logprobs - old)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    return float(surrogate.sum() / (len(LENGTHS) * 16))


def held(objective: Callable[[Array, Array, Array, Array], float], weigh: Callable[[Array], Array]) -> Objective:
    """The objective with weights of the ratio at `numbers`, which no step of a difference changes."""

    def at(logprobs: Array, old: Array, advantages: Array) -> float:
        return objective(logprobs, old, advantages, weigh(START - old))

    return at


START, OLD, ADVANTAGES = numbers(7)


def by_row(log_ratios: Array) -> Array:
    return np.minimum(np.exp([part.sum() for part in rows_of(log_ratios)])[ROW], 1.2)


CASES: dict[str, tuple[Loss, Objective]] = {
    "reinforce": (ReinforceLoss(), sequence_reinforce),
    "reinforce, tokens weighed": (
        ReinforceLoss(correction=Correction(high=1.1)),
        held(weighted_reinforce, lambda log_ratios: np.minimum(np.exp(log_ratios), 1.1)),
    ),
    "reinforce, rows weighed": (
        ReinforceLoss(correction=Correction(level="sequence", high=1.2)),
        held(weighted_reinforce, by_row),
    ),
    "cispo": (CispoLoss(clip_high=0.1), held(cispo, lambda log_ratios: np.minimum(np.exp(log_ratios), 1.1))),
    "cispo of two bounds": (
        CispoLoss(clip=0.1, clip_high=0.1),
        held(cispo, lambda log_ratios: np.clip(np.exp(log_ratios), 0.9, 1.1)),
    ),
    "gspo": (SequenceLoss(clip=0.1, clip_high=0.05), gspo),
    "dr_grpo": (ConstantLoss(constant=16), dr_grpo),
}


def columns(names: Sequence[str]) -> dict[str, torch.Tensor]:
    known = {
        "sampler_logprobs": torch.from_numpy(OLD),
        "logprobs": torch.from_numpy(OLD),
        "reference_logprobs": torch.from_numpy(OLD),
        "advantages": torch.from_numpy(ADVANTAGES),
        "rows": torch.from_numpy(ROW),
    }
    return {name: known[name] for name in names}


def loss_and_gradient(loss: Loss) -> tuple[float, Array]:
    logprobs = torch.tensor(START, requires_grad=True)
    mask = Ragged.of([[True] * length for length in LENGTHS], np.bool_)
    rows, tokens = len(LENGTHS), len(ROW)
    weights = token_weights(mask, loss.normalise, tokens=tokens, rows=rows, constant=loss.constant)
    total = (loss(logprobs, columns(loss.columns)).values * torch.from_numpy(weights).double()).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return float(total.detach()), gradient.numpy()


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_minus_the_papers_objective(case: str) -> None:
    loss, objective = CASES[case]
    value, gradient = loss_and_gradient(loss)
    assert value == pytest.approx(-objective(START, OLD, ADVANTAGES), rel=1e-6)
    steps = np.eye(len(START)) * 1e-6
    differences = [
        (objective(START + step, OLD, ADVANTAGES) - objective(START - step, OLD, ADVANTAGES)) / 2e-6 for step in steps
    ]
    np.testing.assert_allclose(gradient, -np.array(differences), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_diagnostics_have_no_gradient_and_the_reference_is_added(case: str) -> None:
    loss, _ = CASES[case]
    assert isinstance(loss, ReinforceLoss | CispoLoss | SequenceLoss | ConstantLoss)
    logprobs = torch.tensor(START, requires_grad=True)
    plain = loss(logprobs, columns(loss.columns))
    assert not any(metric.requires_grad for metric in plain.metrics.values())
    penalised = loss.model_copy(update={"kl": 0.5})
    assert "reference_logprobs" in penalised.columns
    told = penalised(logprobs, columns(penalised.columns))
    torch.testing.assert_close(told.values - plain.values, 0.5 * told.metrics["reference_kl"])


def test_gspo_clips_whole_rows() -> None:
    told = SequenceLoss(clip=0.1, clip_high=0.05)(
        torch.tensor(START), columns(("sampler_logprobs", "advantages", "rows"))
    )
    assert [len(set(part)) for part in rows_of(told.metrics["ratio"].numpy())] == [1, 1, 1]
    assert [len(set(part)) for part in rows_of(told.metrics["clip_fraction"].numpy())] == [1, 1, 1]


def test_the_ratio_of_a_row_is_a_geometric_mean() -> None:
    logprobs, rows = torch.tensor([0.3, 0.1, -0.5]), torch.tensor([0, 0, 1])
    ratios = sequence_ratios(logprobs, torch.zeros(3), rows)
    torch.testing.assert_close(ratios, torch.tensor([0.2, 0.2, -0.5]).exp())


def test_a_row_far_from_its_sampler_stays_finite() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    far = {"sampler_logprobs": torch.tensor([-900.0, 900.0]), "advantages": torch.tensor([-1.0, 0.0])}
    for loss in (CispoLoss(), SequenceLoss(), ReinforceLoss(correction=Correction(high=2.0))):
        told = loss(logprobs, {**far, "rows": torch.tensor([0, 1])})
        assert all(bool(torch.isfinite(values).all()) for values in (told.values, *told.metrics.values()))


@pytest.mark.parametrize(
    ("schema", "table", "message"),
    [
        (ConstantLoss, {"clip": 0.1}, "which is not set: set it to the longest completion that is allowed, in tokens"),
        (ReinforceLoss, {"clip": 0.2}, "no such key"),
        (CispoLoss, {"clip": 1.5}, "clip = 1.5: must be less than 1"),
        (SequenceLoss, {"clip": 0.0}, "clip = 0.0: must be greater than 0"),
        (ReinforceLoss, {"constant": 8}, 'constant = 8 has no effect with normalise = "sequence-sum"'),
    ],
)
def test_a_wrong_option_is_refused_in_words(
    schema: type[ConstantLoss | ReinforceLoss | CispoLoss | SequenceLoss], table: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(schema, table, "file.toml")
