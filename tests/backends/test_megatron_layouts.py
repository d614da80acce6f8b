"""Megatron on several processes: layouts beside each other, what moves between them, and a vocabulary that they share.

One layout at a time is held in tests/conformance/test_megatron.py.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

import meshrl as rl
from meshrl.errors import ModelError, RankFailed
from meshrl.roles import Sums
from meshrl_megatron.roles import MegatronCritic, MegatronPolicy
from meshrl_megatron.stage import logprobs as shared_logprobs
from meshrl_megatron.world import World
from meshrl_torch.train.fsdp.roles import FsdpCritic, FsdpPolicy
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends import material
from tests.backends.material import RANKS, ModelOf, Warm, near

pytestmark = [*RANKS, pytest.mark.megatron]

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
LAYOUTS: Mapping[str, Sequence[tuple[Mapping[str, int], Mapping[str, object]]]] = {
    "llama": [
        ({"dp": 2, "tp": 2}, {}), ({"dp": 1, "pp": 2, "tp": 2}, {}), ({}, {}), ({"dp": 1, "pp": 4}, {}),
    ],
    "qwen3": [
        ({"dp": 1, "pp": 2, "cp": 2}, {}), ({"dp": 2, "tp": 2}, {"megatron": {"sequence_parallel": False}}), ({}, {}),
        ({"dp": 2, "pp": 2}, {"megatron": {"virtual_stages": 2}, "activation_checkpointing": True}),
    ],
    "qwen2": [
        ({"tp": 2, "dp": 2}, {}), ({"dp": 1, "cp": 2, "tp": 2}, {}), ({"dp": 1, "cp": 4}, {}), ({"dp": 1, "tp": 4}, {}),
    ],
    "qwen3_moe": [
        ({"dp": 2, "cp": 2}, {"megatron": {"experts": 2}}),
        ({"dp": 2, "pp": 2}, {"megatron": {"experts": 2, "virtual_stages": 2}}),
    ],
}  # fmt: skip
"""Layouts of four ranks, each with what it may go wrong with: tied embeddings, norms of queries and keys, experts.

One without axes is a rank of the backend fsdp.
"""


def policy_of(model: object, **keys: object) -> rl.PolicyConfig:
    return rl.PolicyConfig.model_validate({"model": model, "optimizer": OPTIMIZER, "micro_batch_tokens": 32, **keys})


def rollouts(seed: int = 0) -> rl.Batch:
    batch = material.rollouts(rows=9, seed=seed)
    rng, count, offsets = np.random.default_rng(seed), len(batch.tokens.values), batch.tokens.offsets
    return batch.assign(
        rewards=rng.normal(size=9).astype(np.float32),
        values=rl.Ragged(np.full(count, 2.0, np.float32), offsets),
        returns=rl.Ragged(rng.normal(size=count).astype(np.float32), offsets),
    )


async def values(critic: rl.Critic) -> np.ndarray:
    return np.asarray((await (await critic.advantages(rollouts(), rl.Gae())).load()).ragged("values").values)


def same(found: rl.Metrics, expected: rl.Metrics) -> None:
    assert found.means() == pytest.approx(expected.means(), rel=1e-5, abs=1e-5)


async def loaded(policy: rl.Policy) -> rl.Weights:
    return await (await policy.weights()).load()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.wide] * (kind in ("llama", "qwen2"))) for kind in LAYOUTS]
)
async def test_layouts_continue_others_checkpoints(warm: Warm, tmp_path: Path, model_of: ModelOf, kind: str) -> None:
    four, folder = await warm(4), model_of(MODELS[kind])
    plain, kept = TorchPolicy(policy_of(folder)), None
    for step, (axes, options) in enumerate(LAYOUTS[kind]):
        config = policy_of(folder, **options)
        policy: rl.Policy = FsdpPolicy(config)
        if axes:
            policy = await four.shape(**axes).spawn(MegatronPolicy, config)
        if kept:
            await policy.restore(str(tmp_path / f"state-{step - 1}"))
            assert await loaded(policy) == kept, axes
        same(*[await each.update(rollouts(step), rl.ClippedLoss()) for each in (policy, plain)])
        kept = await loaded(policy)
        near(kept, await loaded(plain), 1e-5)
        await policy.checkpoint(str(tmp_path / f"state-{step}"), wait=step % 2 == 0)
        await policy.update(rollouts(), rl.ClippedLoss())  # a copy is written
        await policy.written()
        if axes:
            await rl.stop(policy)


async def test_in_bfloat16_a_layout_is_as_near_as_8_bits_let_it_be(warm: Warm, model_of: ModelOf) -> None:
    config = policy_of(model_of(MODELS["llama"]), dtype="bfloat16")
    halves, plain = await (await warm(4)).shape(dp=2, tp=2).spawn(MegatronPolicy, config), TorchPolicy(config)
    found, one = [(await each.update(rollouts(), rl.ClippedLoss())).means() for each in (halves, plain)]
    assert found["loss"] == pytest.approx(one["loss"], abs=0.02)
    assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)


async def test_a_bfloat16_critic_continues_with_its_float32_head(warm: Warm, tmp_path: Path, model_of: ModelOf) -> None:
    table = {"model": model_of(MODELS["llama"]), "optimizer": OPTIMIZER, "seed": 3, "dtype": "bfloat16"}
    config = rl.CriticConfig.model_validate(table)
    made, again = [await (await warm(2)).shape(dp=2).spawn(MegatronCritic, config) for _ in range(2)]
    await made.update(rollouts(), rl.ValueLoss())
    await made.checkpoint(str(tmp_path))
    await again.restore(str(tmp_path))
    assert (await values(again) == await values(made)).all()
    other = FsdpCritic(config)  # which has the same names
    await other.restore(str(tmp_path))
    np.testing.assert_allclose(await values(other), await values(made), rtol=0, atol=0.02)
    same(*[await each.update(rollouts(1), rl.ValueLoss()) for each in (again, made)])
    assert (await values(again) == await values(made)).all()


NEW = rl.NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=4, max_tokens=48)


async def test_a_checkpoint_that_is_damaged_is_refused_as_a_whole(warm: Warm, tmp_path: Path) -> None:
    two = (await warm(2)).shape(dp=1, tp=2)
    policy, twin = [await two.spawn(MegatronPolicy, policy_of(NEW)) for _ in range(2)]
    folder = tmp_path / "state"
    await twin.update(rollouts(), rl.ClippedLoss())
    await twin.checkpoint(str(folder))
    first, second = sorted(folder.glob("*.safetensors"))
    one, other = first.read_bytes(), second.read_bytes()
    sums, others = Sums.beside(first).read_bytes(), Sums.beside(second).read_bytes()

    async def refused(words: str) -> None:
        with pytest.raises(RankFailed, match=words):
            await policy.restore(str(folder))

    first.write_bytes(one[:100])
    await refused(r"Damaged: .* is not as it was written: its head differs\. Restore it from a copy")
    first.write_bytes(one)
    second.unlink()
    await refused(r"has the files of 1 ranks and not of 2\. Remove the checkpoint")
    second.write_bytes(one)
    Sums.beside(second).write_bytes(sums)
    await refused(r"lacks a part of `model.embed_tokens.weight`, or has it twice")
    second.write_bytes(other)
    Sums.beside(second).write_bytes(others)
    (tmp_path / "elsewhere" / second.name).mkdir(parents=True)
    with pytest.raises(RankFailed, match="elsewhere cannot be written"):
        await policy.checkpoint(str(tmp_path / "elsewhere"))
    fresh = await two.spawn(MegatronPolicy, policy_of(NEW))
    assert await loaded(policy) == await loaded(fresh)
    told = [(await each.update(rollouts(1), rl.ClippedLoss())).means() for each in (policy, fresh)]
    assert told[0] == told[1]
    await policy.restore(str(folder))
    assert await loaded(policy) == await loaded(twin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_moments_are_forgotten_and_half_a_state_is_told(tmp_path: Path, dtype: str) -> None:
    policy, twin = [MegatronPolicy(policy_of(NEW, dtype=dtype)) for _ in range(2)]
    await policy.checkpoint(str(tmp_path))
    await policy.update(rollouts(), rl.ClippedLoss())
    await policy.restore(str(tmp_path))
    told = [(await each.update(rollouts(1), rl.ClippedLoss())).means() for each in (policy, twin)]
    assert told[0] == told[1]
    assert await loaded(policy) == await loaded(twin)

    facts = tmp_path / "state.json"
    facts.write_bytes(facts.read_bytes().replace(b"}", b',"late":{"lm_head.weight":1}}'))
    with pytest.raises(ModelError, match=r"1 of its 0 steps with `lm_head\.weight`, which had no gradient"):
        await policy.restore(str(tmp_path))


TOKENS, VOCABULARY = 6, 11
COLUMNS = {1: 12, 2: 6, 4: 4}
"""Of each rank: 4 ranks have room for 16 tokens, so the last one knows none."""


def part(logits: Tensor, first: int, columns: int) -> Tensor:
    """A rank's columns of the logits, those beyond the vocabulary the highest of all."""
    own = logits[:, first : first + columns]
    padded = torch.full((len(logits), columns), 1e4, dtype=logits.dtype)
    padded[:, : own.shape[1]] = own
    return padded.requires_grad_()


def check(group: ProcessGroup, dtype: torch.dtype, tempered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(TOKENS, VOCABULARY, generator=generator) * 9).to(dtype)
    temperature = torch.rand(TOKENS, generator=generator) + 0.5 if tempered else None
    given = torch.randn(TOKENS, generator=generator)
    chosen, rows = torch.tensor([0, 5, 10, 6, 3, 3]), torch.arange(TOKENS)
    whole = logits.double().requires_grad_()
    right = (whole if temperature is None else whole / temperature[:, None]).log_softmax(-1)
    right[rows, chosen].backward(given.double())
    assert whole.grad is not None

    columns = COLUMNS[group.size()]
    first = group.rank() * columns
    known = max(0, min(columns, VOCABULARY - first))
    own = part(logits, first, columns)
    told = shared_logprobs(own, chosen, temperature, group, first, known)
    values, entropy = told.unbind(1)
    values.backward(given)
    assert values.dtype == torch.float32
    assert own.grad is not None
    torch.testing.assert_close(values.double(), right[rows, chosen], rtol=2e-7, atol=2e-6)
    rounding = 2e-6 if dtype == torch.float32 else 4e-3
    slopes = whole.grad[:, first : first + columns]
    torch.testing.assert_close(own.grad[:, :known].double(), slopes, rtol=rounding, atol=1e-6)
    assert not own.grad[:, known:].any()
    torch.testing.assert_close(entropy.double(), -(right.exp() * right).sum(-1), rtol=0, atol=2e-6)
    with torch.no_grad():
        assert torch.equal(shared_logprobs(own.detach(), chosen, temperature, group, first, known), values)


class Sharer(rl.Actor):
    def __init__(self) -> None:
        self._group = World.of(rl.current_rank(), 1, 1).groups.tp

    @rl.endpoint
    async def check(self) -> None:
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ  # where there is no GPU
        for dtype, tempered in product((torch.float32, torch.bfloat16), (False, True)):
            check(self._group, dtype, tempered)
        none = torch.empty(0, COLUMNS[self._group.size()])
        assert shared_logprobs(none, torch.empty(0, dtype=torch.int64), None, self._group, 0, 1).shape == (0,)


async def test_ranks_that_share_the_vocabulary_get_what_one_has(warm: Warm) -> None:
    four = await warm(4)
    for size in COLUMNS:
        await (await four.shape(dp=4 // size, tp=size).spawn(Sharer)).check()
