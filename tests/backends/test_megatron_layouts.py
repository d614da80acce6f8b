"""Megatron on several processes: layouts beside each other, and what moves from one to another.

One layout at a time is held in tests/conformance/test_megatron.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

import meshrl as rl
from meshrl.errors import ModelError
from meshrl_fsdp.critic import FsdpCritic
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_megatron.critic import MegatronCritic
from meshrl_megatron.policy import MegatronPolicy
from meshrl_megatron.reference import MegatronReference
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference
from tests.backends import material
from tests.backends.material import RANKS_OF_MEGATRON

pytestmark = RANKS_OF_MEGATRON

Warm: TypeAlias = Callable[[int], Awaitable[rl.Mesh]]

OPTIMIZER = {"lr": 0.03, "eps": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5}
"""With so large an epsilon a step is about as long as the gradient: rounding is not made a step of its own."""
SIZES: Mapping[str, Any] = {**material.SHAPE, "num_hidden_layers": 4}
WIDE: Mapping[str, Any] = {**SIZES, "head_dim": 8}
ALL_HEADS: Mapping[str, Any] = {**SIZES, "num_key_value_heads": 4}
MODELS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**ALL_HEADS, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**WIDE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**WIDE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
}
TWICE = {"megatron": {"virtual_stages": 2}}
LAYOUTS: Mapping[str, Sequence[tuple[Mapping[str, int], Mapping[str, object]]]] = {
    "llama": [
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 1, "pp": 2, "tp": 2}, {}),
        ({}, {}),
        ({"dp": 2, "pp": 2}, {**TWICE, "activation_checkpointing": True}),
    ],
    "qwen3": [
        ({"dp": 1, "pp": 2, "cp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"megatron": {"sequence_parallel": False}}),
        ({}, {}),
        ({"dp": 1, "pp": 4}, {}),
    ],
    "qwen2": [
        ({"tp": 2, "dp": 2}, {}),
        ({"dp": 1, "cp": 2, "tp": 2}, {}),
        ({"dp": 2, "cp": 2}, {}),
        ({"dp": 1, "tp": 4}, {}),
    ],
    "qwen3_moe": [
        ({"dp": 2, "cp": 2}, {"megatron": {"experts": 2}}),
        ({"dp": 2, "pp": 2}, {"megatron": {"experts": 2, "virtual_stages": 2}}),
    ],
}
"""Layouts of four ranks, each with what it may go wrong with: tied embeddings, norms of queries and keys, experts.

One without axes is a rank of the backend fsdp.
"""


@pytest.fixture
def folder_of(random_model: Callable[..., str], tmp_path: Path) -> Callable[[str], str]:
    """A model with random norms and biases, so that a gradient that is not summed over ranks is seen."""
    return lambda kind: random_model(MODELS[kind], tmp_path / kind)


def policy_of(model: object, **keys: object) -> rl.PolicyConfig:
    return rl.PolicyConfig.model_validate({"model": model, "optimizer": OPTIMIZER, "micro_batch_tokens": 32, **keys})


def critic_of(model: str) -> rl.CriticConfig:
    return rl.CriticConfig.model_validate({"model": model, "optimizer": OPTIMIZER, "seed": 3})


def rollouts(seed: int = 0) -> rl.Batch:
    """Rows for policies and critics."""
    batch = material.rollouts(rows=9, seed=seed)
    rng, count, offsets = np.random.default_rng(seed), len(batch.tokens.values), batch.tokens.offsets
    return batch.assign(
        rewards=rng.normal(size=9).astype(np.float32),
        values=rl.Ragged(np.full(count, 2.0, np.float32), offsets),
        returns=rl.Ragged(rng.normal(size=count).astype(np.float32), offsets),
    )


async def column(batch: rl.Batch, name: str) -> np.ndarray:
    return np.asarray((await batch.load()).ragged(name).values)


async def values(critic: rl.Critic) -> np.ndarray:
    return await column(await critic.advantages(rollouts(), rl.Gae()), "values")


def same(found: rl.Metrics, expected: rl.Metrics) -> None:
    assert found.means() == pytest.approx(expected.means(), rel=1e-5, abs=1e-5)


async def loaded(policy: rl.Policy) -> rl.Weights:
    return await (await policy.weights()).load()


async def same_weights(one: rl.Policy, other: rl.Policy) -> None:
    found, expected = (await loaded(one)).tensors, (await loaded(other)).tensors
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert np.abs(found[name].astype(np.float64) - array.astype(np.float64)).max() <= 1e-5, name


@pytest.mark.parametrize("kind", LAYOUTS)
async def test_layouts_go_on_from_each_others_checkpoints_with_the_numbers_of_one_rank(
    warm: Warm, tmp_path: Path, folder_of: Callable[[str], str], kind: str
) -> None:
    four, folder = await warm(4), folder_of(kind)
    plain, kept = TorchPolicy(policy_of(folder)), None
    for step, (axes, options) in enumerate(LAYOUTS[kind]):
        config = policy_of(folder, **options)
        policy: rl.Policy = FsdpPolicy(config)
        if axes:
            policy = await four.shape(**axes).spawn(MegatronPolicy, config)
        if kept:
            await policy.restore(str(tmp_path / f"state-{step - 1}"))
            assert await loaded(policy) == kept, axes
        same(
            await policy.update(rollouts(step), rl.ClippedLoss()), await plain.update(rollouts(step), rl.ClippedLoss())
        )
        await same_weights(policy, plain)
        kept = await loaded(policy)
        await policy.checkpoint(str(tmp_path / f"state-{step}"), wait=step % 2 == 0)
        await policy.update(rollouts(), rl.ClippedLoss())  # a copy is written
        await policy.written()
        if axes:
            await rl.stop(policy)


async def test_roles_of_four_layouts_in_the_same_processes_compute_what_one_rank_does(
    warm: Warm, tmp_path: Path, folder_of: Callable[[str], str]
) -> None:
    four, model = await warm(4), folder_of("llama")
    policies: list[rl.Policy] = [
        await four.shape(dp=2, tp=2).spawn(MegatronPolicy, policy_of(model)),
        await four.shape(dp=1, pp=2, tp=2).spawn(MegatronPolicy, policy_of(model)),
        TorchPolicy(policy_of(model)),
    ]
    critics: list[rl.Critic] = [
        await four.shape(dp=2, pp=2).spawn(MegatronCritic, critic_of(model)),
        TorchCritic(critic_of(model)),
    ]
    references: list[rl.Reference] = [
        await four.shape(dp=4).spawn(MegatronReference, rl.ReferenceConfig(model=model)),
        TorchReference(rl.ReferenceConfig(model=model)),
    ]
    for seed in range(2):
        batch = rollouts(seed)
        told = await asyncio.gather(
            *(policy.update(batch, rl.ClippedLoss()) for policy in policies),
            *(critic.update(batch, rl.ValueLoss()) for critic in critics),
        )
        for found, expected in ((told[0], told[2]), (told[1], told[2]), (told[3], told[4])):
            same(found, expected)
        one, two = [await column(await each.logprobs(batch), "reference_logprobs") for each in references]
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
    np.testing.assert_allclose(await values(critics[0]), await values(critics[1]), rtol=0, atol=1e-5)
    for policy in policies[:2]:
        await same_weights(policy, policies[2])

    again = FsdpCritic(critic_of(model))  # which has the same names
    await critics[0].checkpoint(str(tmp_path / "critic"))
    await again.restore(str(tmp_path / "critic"))
    np.testing.assert_allclose(await values(again), await values(critics[0]), rtol=0, atol=1e-5)
    same(*[await critic.update(rollouts(2), rl.ValueLoss()) for critic in (again, critics[0])])


async def test_in_bfloat16_a_layout_is_as_near_as_8_bits_let_it_be(warm: Warm, folder_of: Callable[[str], str]) -> None:
    """In each element, and in sums over ranks."""
    config = policy_of(folder_of("llama"), dtype="bfloat16")
    halves, plain = await (await warm(4)).shape(dp=2, tp=2).spawn(MegatronPolicy, config), TorchPolicy(config)
    found, one = [(await each.update(rollouts(), rl.ClippedLoss())).means() for each in (halves, plain)]
    assert found["loss"] == pytest.approx(one["loss"], abs=0.02)
    assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)


def new_model(characters: str = "abcdefgh>") -> rl.NewModel:
    return rl.NewModel(characters=characters, hidden_size=16, ffn_size=24, layers=2, heads=4, max_tokens=48)


async def test_a_checkpoint_that_is_not_whole_or_another_models_is_refused_and_nothing_taken(
    warm: Warm, tmp_path: Path
) -> None:
    two = (await warm(2)).shape(dp=1, tp=2)
    policy, twin = [await two.spawn(MegatronPolicy, policy_of(new_model())) for _ in range(2)]
    larger = await two.spawn(MegatronPolicy, policy_of(new_model("abcdefghi>")))
    folder = tmp_path / "state"
    await twin.update(rollouts(), rl.ClippedLoss())
    await twin.checkpoint(str(folder))
    files = sorted(folder.glob("*.safetensors"))
    one, other = [file.read_bytes() for file in files]

    async def refused(asked: rl.Policy, words: str) -> None:
        with pytest.raises(rl.RankFailed, match=words):
            await asked.restore(str(folder))

    await refused(larger, r"of another policy: `model.embed_tokens.weight` is \[11, 16\] there and \[12, 16\] here")
    files[0].write_bytes(one[:100])
    await refused(policy, "cannot be read as the state of a policy: SafetensorError.*Remove the checkpoint")
    files[0].write_bytes(one)
    files[1].unlink()
    await refused(policy, r"has the files of 1 ranks and not of 2\. Remove the checkpoint")
    files[1].write_bytes(one)
    await refused(policy, r"lacks a part of `model.embed_tokens.weight`, or has it twice")
    files[1].write_bytes(other)
    (tmp_path / "elsewhere" / files[1].name).mkdir(parents=True)
    with pytest.raises(rl.RankFailed, match="elsewhere cannot be written"):
        await policy.checkpoint(str(tmp_path / "elsewhere"))
    fresh = await two.spawn(MegatronPolicy, policy_of(new_model()))
    assert await loaded(policy) == await loaded(fresh)
    assert (await policy.update(rollouts(1), rl.ClippedLoss())).means() == (
        await fresh.update(rollouts(1), rl.ClippedLoss())
    ).means()
    await policy.restore(str(folder))
    assert await loaded(policy) == await loaded(twin)


async def test_a_policy_in_use_forgets_its_moments_for_a_checkpoint_without(tmp_path: Path) -> None:
    policy, twin = [MegatronPolicy(policy_of(new_model())) for _ in range(2)]
    await policy.checkpoint(str(tmp_path))
    await policy.update(rollouts(), rl.ClippedLoss())
    await policy.restore(str(tmp_path))
    told = [(await each.update(rollouts(1), rl.ClippedLoss())).means() for each in (policy, twin)]
    assert told[0] == told[1]
    assert await loaded(policy) == await loaded(twin)


async def test_a_state_that_was_taken_in_part_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MegatronPolicy(policy_of(new_model()))
    await policy.checkpoint(str(tmp_path))

    def fail(*_: object) -> None:
        raise ModelError("the disk is gone")

    monkeypatch.setattr("meshrl_hf.boxes.Boxes.read", fail)
    with pytest.raises(ModelError, match=r"the disk is gone. The policy has loaded a part of it and cannot be used"):
        await policy.restore(str(tmp_path))
