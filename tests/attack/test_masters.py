"""A model in bfloat16 learns what one in float32 does: its optimizer steps on float32 masters."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshrl as rl
from meshrl.algo import Loss
from meshrl.roles import OptimizerConfig
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchRewardModel
from meshrl_torch.train.optimizer import Optimizer

MODEL = rl.NewModel(characters="abcdefgh>", hidden_size=32, ffn_size=48, layers=2, heads=2, max_tokens=16)
SLOW = OptimizerConfig(lr=1e-5)
TABLE = {"model": MODEL, "dtype": "bfloat16", "optimizer": SLOW}


def rows() -> rl.Batch:
    random, places = np.random.default_rng(0), np.arange(8 * 12)
    tokens = rl.Ragged.of([random.integers(2, 11, 12) for _ in range(8)], np.int32)
    mask = places % 12 > 0
    floats = {"returns": random.normal(size=places.size), "values": 0.0 * places, "labels": mask}
    columns = {name: rl.Ragged(each.astype(np.float32), tokens.offsets) for name, each in floats.items()}
    return rl.Batch.of(tokens=tokens, loss_mask=rl.Ragged(mask, tokens.offsets), **columns)


async def test_updates_of_1e_5_lower_the_loss_in_bfloat16_as_in_float32(tmp_path: Path) -> None:
    lowered: list[float] = []
    for dtype in ("float32", "bfloat16"):
        trained = TorchPolicy(rl.PolicyConfig.model_validate({**TABLE, "dtype": dtype}))
        losses = [(await trained.update(rows(), rl.CrossEntropy()))["loss"] for _ in range(11)]
        lowered.append(losses[0] - losses[-1])
        await trained.checkpoint(str(tmp_path / dtype))
        masters = [name for name in load_file(tmp_path / dtype / "state.safetensors") if "float32" in name]
        assert bool(masters) == (dtype == "bfloat16")
        assert {array.dtype.name for array in (await trained.weights()).tensors.values()} == {dtype}
    assert lowered[0] > 0.003
    assert lowered[1] == pytest.approx(lowered[0], rel=0.1)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: TorchPolicy(rl.PolicyConfig.model_validate(TABLE)), rl.CrossEntropy()),
        (lambda: TorchCritic(rl.CriticConfig.model_validate(TABLE)), rl.ValueLoss()),
        pytest.param(
            lambda: TorchRewardModel(rl.RewardTrainingConfig.model_validate(TABLE)),
            rl.ProcessLoss(),
            marks=pytest.mark.wide,
        ),
    ],
)
async def test_what_is_resumed_in_bfloat16_goes_on_to_the_bit(
    make: Callable[[], rl.Policy | rl.Critic | rl.RewardModel], loss: Loss, tmp_path: Path
) -> None:
    one = make()
    for _ in range(2):
        await one.update(rows(), loss)
    await one.checkpoint(str(tmp_path / "state"))
    other = make()
    await other.restore(str(tmp_path / "state"))
    for _ in range(2):
        assert (await one.update(rows(), loss)).means() == (await other.update(rows(), loss)).means()
    states = []
    for role, name in ((one, "one"), (other, "other")):
        await role.checkpoint(str(tmp_path / name))
        states.append(load_file(tmp_path / name / "state.safetensors"))
    assert {name for name, each in states[0].items() if not torch.equal(each, states[1][name])} == set()
    masters = {name for name in states[0] if name.startswith("model/float32/")}
    assert masters
    assert all(states[0][name].dtype == torch.float32 for name in masters)
    assert not any(
        torch.equal(states[0][name], states[0][name].bfloat16().float()) for name in masters if "norm" in name
    )


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Optimizer(SLOW, [parameter])
    for _ in range(300):  # in bfloat16, 256 + 1 is 256
        parameter.sum().backward()
    assert optimizer.step("logprobs") == 300
    assert parameter.grad is None
