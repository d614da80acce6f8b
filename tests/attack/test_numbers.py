"""Numbers that are no numbers, too large, without a sign, of a type that rounds, and log-probs of restricted draws."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import meshrl as rl
from meshrl.errors import DataError, ModelError
from meshrl.roles import OptimizerConfig
from meshrl.run import find_doubts, load_job, shipped_configs
from meshrl.tasks.function import boundary
from meshrl_torch.sample.draw import Draw, key
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchRewardModel
from meshrl_torch.train.optimizer import Optimizer
from meshrl_vllm.whole_logprobs import return_whole_logprobs

SHIPPED = Path(__file__).parents[2] / "configs/grpo/quickstart.toml"
MODEL = rl.NewModel(characters="abcdefgh>", hidden_size=32, ffn_size=48, layers=2, heads=2, max_tokens=16)


def rollouts(advantages: np.ndarray, logprob: float = -2.0) -> rl.Batch:
    tokens = rl.Ragged.of([[2, 3, 4, 5], [2, 3, 4, 5, 6]], np.int32)
    mask = rl.Ragged(np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], np.bool_), tokens.offsets)
    logprobs = np.full(9, -2.0, np.float32)
    logprobs[7] = logprob
    return rl.Batch.of(
        tokens=tokens, loss_mask=mask, sampler_logprobs=rl.Ragged(logprobs, tokens.offsets), advantages=advantages
    )


async def test_a_nan_among_learned_log_probs_is_refused_and_elsewhere_is_not_read() -> None:
    policy = TorchPolicy(rl.PolicyConfig(model=MODEL))
    batch = rollouts(np.array([1, -1], np.float32), logprob=np.nan)
    with pytest.raises(DataError, match=r"`sampler_logprobs` is not finite at 1 learned tokens, .* row 1, token 3"):
        await policy.update(batch, rl.ClippedLoss())
    assert (await policy.weights()).version == 0
    mask = batch.loss_mask.values.copy()
    mask[7] = False
    await policy.update(batch.assign(loss_mask=rl.Ragged(mask, batch.tokens.offsets)), rl.ClippedLoss())


def test_a_logit_that_is_not_finite_names_row_and_version() -> None:
    for bad, temperature in ((np.nan, 0.0), (np.nan, 1.0), (np.inf, 0.0), (np.inf, 1.0)):
        draw = Draw(rl.Sampling(temperature=temperature), key(0))
        logits = torch.zeros(3, 4)
        logits[1, 2] = bad
        with pytest.raises(ModelError, match=r"row 8 has logits that are not finite, by weights of version 5"):
            draw(logits, np.array([7, 8, 9]), np.zeros(3, np.int64), np.full(3, 5))


def test_groups_whose_rewards_differ_by_rounding_teach_nothing() -> None:
    rewards = np.array([1000, 1000, np.nextafter(np.float32(1000), np.float32(0)), 1000, 1, 0], np.float32)
    groups = np.array([0, 0, 0, 0, 1, 1])
    advantages = rl.group_advantages(rewards, groups)
    assert advantages[:4].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(advantages[4:], [0.5**0.5, -(0.5**0.5)], rtol=1e-5)
    apart = rl.group_advantages(np.array([1000, 1000.5], np.float32), np.zeros(2))
    np.testing.assert_allclose(apart, [-(0.5**0.5), 0.5**0.5], rtol=1e-5)


async def test_a_reward_beyond_float32_is_an_error_of_its_row() -> None:
    value, error = await boundary(lambda *_: 1e39, "", "", {})
    assert value == 0.0
    assert "at most 3.403e+38 in size" in str(error)


def test_the_seed_of_a_run_is_that_of_each_role_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine.toml"
    config.write_text(f"{SHIPPED.read_text('utf-8')}\n[reference]\nseed = 5\n", "utf-8")
    job = load_job(config, ["run.seed=3", "sampler.seed=4"])
    roles = {name: getattr(job.config, name).seed for name in ("policy", "sampler", "reference")}
    assert roles == {"policy": 3, "sampler": 4, "reference": 5}
    policy = cast("dict[str, object]", job.resolved["policy"])
    assert policy["seed"] == 3, "what is resolved says what was"


async def test_a_script_of_ones_own_has_the_seed_too(tmp_path: Path) -> None:
    async with rl.Run(rl.RunConfig(name="mine", folder=str(tmp_path), seed=7)) as run:
        first = await (await run.spawn(rl.Policy, rl.PolicyConfig(model=MODEL))).weights()
        same = await (await run.spawn(rl.Policy, rl.PolicyConfig(model=MODEL, seed=7))).weights()
        other = await (await run.spawn(rl.Policy, rl.PolicyConfig(model=MODEL, seed=0))).weights()
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()


SLOW = OptimizerConfig(lr=1e-5)
TABLE = {"model": MODEL, "dtype": "bfloat16", "optimizer": SLOW}


STATE = "shard-00001-model-00001-of-00001.safetensors"


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
        assert {each.dtype for each in load_file(tmp_path / dtype / STATE).values()} == {torch.float32}
        assert {array.dtype.name for array in (await trained.weights()).tensors.values()} == {dtype}
    assert lowered[0] > 0.003
    assert lowered[1] == pytest.approx(lowered[0], rel=0.1)


async def test_what_is_resumed_in_bfloat16_goes_on_to_the_bit(tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, object]] = [
        (TorchPolicy, rl.PolicyConfig, rl.CrossEntropy()),
        (TorchCritic, rl.CriticConfig, rl.ValueLoss()),
        (TorchRewardModel, rl.RewardTrainingConfig, rl.ProcessLoss()),
    ]
    for role_class, config, loss in cases:
        one, other = (role_class(config.model_validate(TABLE)) for _ in range(2))
        for _ in range(2):
            await one.update(rows(), loss)
        await one.checkpoint(str(tmp_path / "state"))
        await other.restore(str(tmp_path / "state"))
        for _ in range(2):
            assert (await one.update(rows(), loss)).means() == (await other.update(rows(), loss)).means()
        states = []
        for role, name in ((one, "one"), (other, "other")):
            await role.checkpoint(str(tmp_path / name))
            states.append(load_file(tmp_path / name / STATE))
        assert {name for name, each in states[0].items() if not torch.equal(each, states[1][name])} == set()
        masters = {name: each for name, each in states[0].items() if name.startswith("model/")}
        assert {each.dtype for each in masters.values()} == {torch.float32}
        norms = [each for name, each in masters.items() if "norm" in name]
        assert not any(torch.equal(each, each.bfloat16().float()) for each in norms)


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Optimizer(SLOW, [parameter])
    for _ in range(300):  # in bfloat16, 256 + 1 is 256
        parameter.sum().backward()
    assert optimizer.step("logprobs", optimizer.settings()) == 300
    assert parameter.grad is None


def restricted(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Written into the logits, as vLLM may: the two most probable tokens are left."""
    if k is None and p is None:
        return logits
    return logits.masked_fill_(logits < logits.topk(2).values[:, 1:], -torch.inf)


def first(logits: Tensor, _: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the `TopKTopPSampler` of vLLM's first model runner."""
    left = restricted(logits, k, p)
    return left.argmax(-1), left.log_softmax(-1)


def second(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """As the sampler of vLLM's second model runner, whose log-probs are made of the logits that it gives."""
    left = restricted(logits, *rest[3:5])
    return left.argmax(-1), left


def test_either_of_vllms_samplers_tells_the_whole_distribution() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    one, other = (
        SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=first)),
        SimpleNamespace(_sample_random=second),
    )
    for sampler in (one, other):
        return_whole_logprobs(sampler)
    for p in (None, torch.full((3,), 0.9)):
        tokens, logprobs = one.topk_topp_sampler.forward(logits.clone(), {}, None, p)
        others, left = other._sample_random(logits.clone(), 0, 0, 0, None, p, False)
        for drawn, told in ((tokens, logprobs), (others, left.log_softmax(-1))):
            assert torch.equal(drawn, logits.argmax(-1))
            assert torch.equal(told, logits.log_softmax(-1)), p


def doubts(config: str, *overrides: str) -> list[str]:
    return find_doubts(load_job(shipped_configs()[config], list(overrides)).config)


def test_a_restricted_draw_under_a_loss_with_ratios_is_warned_of_by_name() -> None:
    (doubt,) = doubts("gspo/quickstart", "sampling.top_p=0.9")
    assert doubt.startswith("sampling.top_p = 0.9 with SequenceLoss: rows are sampled from a part of the distribution")
    assert len(doubts("grpo/quickstart", "sampling.top_p=0.9", "sampling.top_k=20")) == 2
    assert doubts("gspo/quickstart") == []
    assert doubts("expert_iteration/quickstart", "sampling.top_k=20") == []
