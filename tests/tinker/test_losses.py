"""The built-in losses through the server, against the formulas in float64 on the model as transformers runs it."""

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.types import LossFnType
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tinker.served import client, datum

ROWS = [[1, 5, 3, 8, 2, 7], [4, 4, 9], [10, 2, 6, 1]]
RANDOM = np.random.default_rng(3)
SAMPLED = [RANDOM.normal(-2.4, 0.4, len(row) - 1).tolist() for row in ROWS]
ADVANTAGES = [RANDOM.normal(0, 1, len(row) - 1).tolist() for row in ROWS]
MASKS = [[0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0], [0.0, 1.0, 1.0]]


def gspo(p: Tensor, q: Tensor, a: Tensor, m: Tensor, low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> Tensor:
    mean = ((p.detach() - q) * m).sum() / m.sum()
    ratio = mean.exp() * (p - p.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def ppo(p: Tensor, q: Tensor, a: Tensor, m: Tensor, low: float = 0.8, high: float = 1.2) -> Tensor:
    ratio = (p - q).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def cispo(p: Tensor, q: Tensor, a: Tensor, m: Tensor, low: float = 0.8, high: float = 1.2) -> Tensor:
    return -((p - q).exp().clamp(low, high).detach() * a * p).sum()


def dro(p: Tensor, q: Tensor, a: Tensor, m: Tensor, beta: float = 0.05) -> Tensor:
    return -(p * a - beta / 2 * (p - q) ** 2).sum()


BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
CASES: dict[str, tuple[LossFnType, Any, dict[str, float] | None]] = {
    "cross_entropy": ("cross_entropy", lambda p, q, a, m: -(a * p).sum(), None),
    "importance_sampling": ("importance_sampling", lambda p, q, a, m: -((p - q).exp() * a).sum(), None),
    "ppo": ("ppo", ppo, None),
    "ppo bounded": ("ppo", lambda p, q, a, m: ppo(p, q, a, m, 0.9, 1.05), BOUNDS),
    "cispo": ("cispo", cispo, None),
    "cispo bounded": ("cispo", lambda p, q, a, m: cispo(p, q, a, m, 0.9, 1.05), BOUNDS),
    "dro": ("dro", dro, None),
    "dro beta": ("dro", lambda p, q, a, m: dro(p, q, a, m, 0.7), {"beta": 0.7}),
    "gspo": ("gspo", gspo, None),
    "gspo bounded": ("gspo", lambda p, q, a, m: gspo(p, q, a, m, 0.9, 1.05), BOUNDS),
}


def rows_for(loss: str) -> list[tinker.Datum]:
    data: list[tinker.Datum] = []
    for tokens, sampled, advantages, mask in zip(ROWS, SAMPLED, ADVANTAGES, MASKS, strict=True):
        if loss == "cross_entropy":
            data.append(datum(tokens, weights=advantages))
        else:
            own = {"sequence_ratio_mask": mask} if loss == "gspo" else {}
            data.append(datum(tokens, logprobs=sampled, advantages=advantages, **own))
    return data


@pytest.fixture(scope="module")
def training(url: str) -> tinker.TrainingClient:
    return client(url).create_lora_training_client("tiny").result()


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_its_formula(case: str, training: tinker.TrainingClient, model: str) -> None:
    loss, formula, settings = CASES[case]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    known: list[Tensor] = []
    for tokens, sampled, advantages, mask in zip(ROWS, SAMPLED, ADVANTAGES, MASKS, strict=True):
        logits = network(torch.tensor([tokens[:-1]])).logits[0]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        known.append(own.detach())
        total = total + formula(own, *(torch.tensor(each, dtype=torch.float64) for each in (sampled, advantages, mask)))
    total.backward()
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in network.parameters() if each.grad is not None]))

    alone = training.forward(rows_for(loss), loss, settings).result().metrics["loss:sum"]
    assert alone == pytest.approx(float(total.detach()), rel=1e-6, abs=1e-6)
    passed = training.forward_backward(rows_for(loss), loss, settings)
    stepped = training.optim_step(types.AdamParams(learning_rate=0.0))
    assert passed.result().metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-6, abs=1e-6)
    for told, right in zip(passed.result().loss_fn_outputs, known, strict=True):
        np.testing.assert_allclose(told["logprobs"].to_numpy(), right.numpy(), atol=1e-6)
    assert (stepped.result().metrics or {})["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_custom_loss_runs_in_the_client_and_has_its_gradient(training: tinker.TrainingClient) -> None:
    def custom(data: list[tinker.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weighed = [own @ torch.tensor(each) for own, each in zip(logprobs, ADVANTAGES, strict=True)]
        return -torch.stack(weighed).sum(), {"mine": 1.0}

    custom_rows = [
        tinker.Datum(row.model_input, {"target_tokens": row.loss_fn_inputs["target_tokens"]}) for row in rows_for("ppo")
    ]
    passed = training.forward_backward_custom(custom_rows, custom).result()
    norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    same = training.forward_backward(rows_for("cross_entropy"), "cross_entropy").result()
    right = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    assert passed.metrics["mine"] == 1.0
    assert passed.metrics["loss:sum"] == pytest.approx(same.metrics["loss:sum"], rel=1e-6)
    assert norm is not None
    assert right is not None
    assert norm["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-6)


def test_a_target_need_not_be_the_next_token(training: tinker.TrainingClient, model: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    told = training.forward([datum([3, 1, 7, 2], target_tokens=[0, 9, 5], weights=[1.0] * 3)], "cross_entropy").result()
    logprobs = network(torch.tensor([[3, 1, 7]])).logits[0].log_softmax(-1).detach()
    right = [float(logprobs[place, token]) for place, token in enumerate([0, 9, 5])]
    np.testing.assert_allclose(told.loss_fn_outputs[0]["logprobs"].to_numpy(), right, atol=1e-6)


def test_many_rows_go_in_several_requests_and_add_up(url: str) -> None:
    service = client(url)
    training = service.create_lora_training_client("tiny").result()
    data = [datum(ROWS[place % 3], weights=[1.0] * (len(ROWS[place % 3]) - 1)) for place in range(2100)]
    passed = training.forward_backward(data, "cross_entropy").result()
    once = training.forward(data[:3], "cross_entropy").result().metrics["loss:sum"]
    assert len(passed.loss_fn_outputs) == 2100
    assert passed.metrics["loss:sum"] == pytest.approx(700 * once, rel=1e-5)
