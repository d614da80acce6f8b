"""Megatron on several processes: layouts beside each other, and what moves from one to another.

One layout at a time is held in tests/conformance/test_megatron.py.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from meshrl import (
    Actor,
    Batch,
    ClippedLoss,
    Critic,
    CriticConfig,
    Gae,
    Gather,
    Mesh,
    Metrics,
    Policy,
    PolicyConfig,
    Ragged,
    Reference,
    ReferenceConfig,
    Resources,
    ValueLoss,
    endpoint,
    stop,
)
from meshrl.testing.conformance import Check, Harness, Subject, checkpoints, name_of, numbers, state
from meshrl_hf.text import character_tokenizer
from meshrl_megatron.critic import MegatronCritic
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.policy import MegatronPolicy
from meshrl_megatron.reference import MegatronReference
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.megatron]

Warm: TypeAlias = Callable[[int], Awaitable[Mesh]]

OPTIMIZER = {"lr": 0.03, "eps": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5}
"""With so large an epsilon a step is about as long as the gradient: rounding is not made a step of its own."""


@pytest.fixture(scope="module")
def model(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, fewer heads of keys than of queries, a head of its own."""
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.2,
    )
    return random_model(config, tmp_path_factory.mktemp("model"), noise=0)


def policy_of(model: str, **keys: object) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {"model": model, "backend": "megatron", "optimizer": OPTIMIZER, "micro_batch_tokens": 32, **keys}
    )


def critic_of(model: str) -> CriticConfig:
    return CriticConfig.model_validate({**policy_of(model).model_dump(include={"model", "optimizer"}), "seed": 3})


def rollouts(rows: int = 9, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = Ragged.of([rng.integers(2, 11, 4 + row) for row in range(rows)], np.int32)
    count = len(tokens.values)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(np.concatenate([np.arange(4 + row) >= 2 for row in range(rows)]), tokens.offsets),
        sampler_logprobs=Ragged(np.full(count, -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        values=Ragged(np.full(count, 2.0, np.float32), tokens.offsets),
        returns=Ragged(rng.normal(size=count).astype(np.float32), tokens.offsets),
    )


async def column(batch: Batch, name: str) -> np.ndarray:
    return np.asarray((await batch.load()).ragged(name).values)


def same(found: Metrics, expected: Metrics, rounding: float) -> None:
    assert found.means() == pytest.approx(expected.means(), rel=rounding, abs=rounding)


async def same_weights(one: Policy, other: Policy, rounding: float) -> None:
    found, expected = [(await (await each.weights()).load()).tensors for each in (one, other)]
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert np.abs(found[name].astype(np.float64) - array.astype(np.float64)).max() <= rounding, name


class Witness(Actor):
    """Tells what Megatron keeps for the whole process."""

    @endpoint
    async def groups(self) -> Gather[np.ndarray]:
        """How many groups of ranks Megatron's global state has."""
        state = vars(sys.modules["megatron.core.parallel_state"]).values()
        return np.array([sum(isinstance(each, ProcessGroup) for each in state)])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_four_layouts_in_the_same_processes_compute_what_one_rank_does(warm: Warm, model: str) -> None:
    four = await warm(4)
    config, frozen = policy_of(model), ReferenceConfig(model=model, backend="megatron")
    policies: list[Policy] = [
        await four.shape(dp=2, tp=2).spawn(MegatronPolicy, config),
        await four.shape(dp=1, pp=2, tp=2).spawn(MegatronPolicy, config),
        TorchPolicy(config),
    ]
    critics: list[Critic] = [
        await four.shape(dp=2, pp=2).spawn(MegatronCritic, critic_of(model)),
        TorchCritic(critic_of(model)),
    ]
    references: list[Reference] = [
        await four.shape(dp=4).spawn(MegatronReference, frozen),
        TorchReference(frozen),
    ]
    for seed in range(3):
        batch = rollouts(seed=seed)
        told = await asyncio.gather(
            *(policy.update(batch, ClippedLoss()) for policy in policies),
            *(critic.update(batch, ValueLoss()) for critic in critics),
        )
        for found, expected in ((told[0], told[2]), (told[1], told[2]), (told[3], told[4])):
            same(found, expected, 1e-5)
        one, two = [await column(await each.logprobs(batch), "reference_logprobs") for each in references]
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
    one, two = [await column(await critic.advantages(rollouts(), Gae()), "values") for critic in critics]
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
    for policy in policies[:2]:
        await same_weights(policy, policies[2], 1e-5)
    assert (await (await four.spawn(Witness)).groups()).tolist() == [0] * 4


FOUR = Subject("megatron", {"dp": 1, "pp": 2, "tp": 2}, "ray", resources=Resources(cpus=0))
KEPT = [
    numbers.uneven_rows,
    numbers.critic_updates,
    numbers.a_reference_takes_weights,
    state.weights,
    state.saving,
    checkpoints.a_policy_goes_on,
]


@pytest.mark.parametrize("harness", [pytest.param(FOUR, id=str(FOUR))], indirect=True)
@pytest.mark.parametrize("check", KEPT, ids=name_of)
async def test_a_layout_of_four_ranks_conforms(harness: Harness, check: Check) -> None:
    await harness.run(check)


SHAPES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
}
"""Models of four layers by their type; all but the mixture have tied embeddings."""
LAYOUTS: list[tuple[str, dict[str, int], dict[str, object]]] = [
    ("llama", {"dp": 2, "pp": 2}, {"virtual_stages": 2}),
    ("llama", {"dp": 1, "pp": 4}, {}),
    ("llama", {"dp": 2, "cp": 2}, {}),
    ("qwen2", {"tp": 2, "dp": 2}, {}),
    ("qwen3", {"dp": 2, "tp": 2}, {"sequence_parallel": False}),
    ("qwen3", {"dp": 1, "pp": 2, "cp": 2}, {}),
    ("qwen3", {"dp": 1, "cp": 2, "tp": 2}, {}),
    ("qwen3_moe", {"dp": 2, "cp": 2}, {"experts": 2}),
    ("qwen3_moe", {"dp": 2, "pp": 2}, {"experts": 2, "virtual_stages": 2}),
]
"""Layouts of four ranks, each with what it may go wrong with: tied embeddings, norms of queries and keys, experts."""


def of_type(kind: str, folder: Path) -> str:
    """A model with random norms and biases, so that a gradient that is not summed over ranks is seen."""
    torch.manual_seed(0)
    options = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "tie_word_embeddings": kind != "qwen3_moe",
        "bos_token_id": None,
        "eos_token_id": 1,
        "initializer_range": 0.2,
        **SHAPES[kind],
    }
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    character_tokenizer("abcdefgh>", 48).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_each_type_of_model_in_layouts_of_four_ranks_computes_what_one_rank_does(
    warm: Warm, tmp_path: Path
) -> None:
    four = await warm(4)
    for kind in SHAPES:
        folder = of_type(kind, tmp_path / kind)
        plain = TorchPolicy(policy_of(folder))
        expected = [await plain.update(rollouts(seed=seed), ClippedLoss()) for seed in range(2)]
        for axes, layout in [(axes, layout) for each, axes, layout in LAYOUTS if each == kind]:
            policy = await four.shape(**axes).spawn(MegatronPolicy, policy_of(folder, megatron=layout))
            for seed in range(2):
                same(await policy.update(rollouts(seed=seed), ClippedLoss()), expected[seed], 1e-5)
            await same_weights(policy, plain, 1e-5)
            await stop(policy)

    # In bfloat16 as near as its 8 bits let it be, in each element and in sums over ranks.
    config = policy_of(str(tmp_path / "llama"), dtype="bfloat16")
    halves, plain = await four.shape(dp=2, tp=2).spawn(MegatronPolicy, config), TorchPolicy(config)
    found, one = [(await each.update(rollouts(), ClippedLoss())).means() for each in (halves, plain)]
    assert found["loss"] == pytest.approx(one["loss"], abs=0.02)
    assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)


async def test_what_two_ranks_wrote_that_split_matrices_a_pipeline_reads(
    warm: Warm, model: str, tmp_path: Path
) -> None:
    two = await warm(2)
    split = await two.shape(dp=1, tp=2).spawn(MegatronPolicy, policy_of(model))
    for seed in range(2):
        await split.update(rollouts(seed=seed), ClippedLoss())
    await split.checkpoint(str(tmp_path / "state"))
    pipeline = await two.shape(dp=1, pp=2).spawn(MegatronPolicy, policy_of(model))
    await pipeline.restore(str(tmp_path / "state"))
    await same_weights(pipeline, split, 0)
    for seed in (2, 3):
        told = [await each.update(rollouts(seed=seed), ClippedLoss()) for each in (pipeline, split)]
        same(told[0], told[1], 1e-6)
    await same_weights(pipeline, split, 1e-6)


async def test_a_reference_takes_the_weights_of_a_policy_of_another_layout(warm: Warm, model: str) -> None:
    two = await warm(2)
    policy = await two.shape(dp=1, tp=2).spawn(MegatronPolicy, policy_of(model))
    reference = await two.shape(dp=1, pp=2).spawn(MegatronReference, ReferenceConfig(model=model, backend="megatron"))
    batch = rollouts()
    before = await column(await reference.logprobs(batch), "reference_logprobs")
    await policy.update(batch, ClippedLoss())
    await reference.load(await policy.weights())
    found = await column(await reference.logprobs(batch), "reference_logprobs")
    expected = await column(await policy.logprobs(batch), "logprobs")
    assert np.abs(expected - before).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


async def test_several_stages_a_rank_and_recomputed_layers_leave_the_numbers(warm: Warm, model: str) -> None:
    shaped = (await warm(2)).shape(dp=1, pp=2)
    plain = TorchPolicy(policy_of(model))
    twice = MegatronConfig(virtual_stages=2)
    policies = [
        await shaped.spawn(MegatronPolicy, policy_of(model, megatron=layout, activation_checkpointing=recomputed))
        for layout, recomputed in ((twice, False), (twice, True), (MegatronConfig(), True))
    ]
    for seed in range(2):
        expected = await plain.update(rollouts(seed=seed), ClippedLoss())
        for policy in policies:
            same(await policy.update(rollouts(seed=seed), ClippedLoss()), expected, 1e-5)
    await same_weights(policies[1], policies[0], 1e-6)
    for policy in policies:
        await same_weights(policy, plain, 1e-5)
