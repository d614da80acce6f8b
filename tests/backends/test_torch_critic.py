"""The torch critic: values and gradients equal transformers' hidden states and a linear layer, row by row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from meshrl import (
    Batch,
    CriticConfig,
    CrossEntropy,
    Gae,
    NewModel,
    OptimizerConfig,
    PolicyConfig,
    Ragged,
    ValueLoss,
    explained_variance,
    gae,
)
from meshrl.errors import ContractError, DataError, ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_hf.value_head import ValueModel
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)


def critic(*, seed: int | None = 0, **changes: object) -> TorchCritic:
    """A critic, far from its initialisation unless `seed` is None."""
    made = TorchCritic(CriticConfig.model_validate({"model": MODEL, **changes}))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in valued(made).parameters.values():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return made


def valued(made: TorchCritic) -> ValueModel:
    return made._valued


def floats(array: np.ndarray[Any, Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def rollouts(rows: int = 14, prompts: int = 4, seed: int = 0) -> Batch:
    """Rows with shared prompts, some of two turns: what stands between them is not learned."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(2, 11, rng.integers(1, 9)) for _ in range(prompts)]
    pairs = [(heads[rng.integers(prompts)], rng.integers(1, 11, rng.integers(1, 10))) for _ in range(rows)]
    tokens = Ragged.of([np.concatenate(pair) for pair in pairs], np.int32)
    masks = [np.arange(len(a) + len(b)) >= len(a) for a, b in pairs]
    for mask in masks[::3]:
        mask[-3:-1] = False
    rewards = rng.normal(size=rows).astype(np.float32)
    return Batch.of(tokens=tokens, loss_mask=Ragged.of(masks, np.bool_), rewards=rewards)


def by_row(made: TorchCritic, batch: Batch) -> list[Tensor]:
    """The value before each token by transformers' own attention, one row at a time."""
    network = valued(made).model.network
    network.set_attn_implementation("eager")
    rows: list[Tensor] = []
    for row in range(len(batch)):
        ids = torch.from_numpy(batch.tokens[row].astype(np.int64))
        states = network(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
        rows.append(torch.cat([torch.zeros(1), valued(made).head(states[:-1])[:, 0]]))
    network.set_attn_implementation("meshrl")
    return rows


async def test_values_are_those_before_each_learned_token_and_advantages_follow_from_them() -> None:
    made, batch = critic(micro_batch_tokens=64), rollouts()
    found = await made.advantages(batch, Gae(decay=0.9))
    expected = torch.cat(by_row(made, batch)).detach().numpy() * batch.loss_mask.values
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(floats(found.ragged("values").values), expected, atol=1e-5)
    by_hand = gae(batch.rewards, found.ragged("values"), batch.loss_mask, Gae(decay=0.9))
    assert (found.ragged("advantages"), found.ragged("returns")) == by_hand


async def test_a_new_head_values_nothing() -> None:
    found = await critic(seed=None).advantages(rollouts(), Gae())
    assert not np.any(found.ragged("values").values)


async def test_the_kl_in_the_reward_reads_the_log_probs() -> None:
    batch, made = rollouts(), critic(seed=None)
    zeros = Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets)
    ones = Ragged(np.ones(len(batch.tokens.values), np.float32), batch.tokens.offsets)
    found = await made.advantages(batch.assign(logprobs=ones, reference_logprobs=zeros), Gae(decay=1, kl=0.5))
    expected = [float(batch.rewards[row]) - 0.5 * int(mask.sum()) for row, mask in enumerate(batch.loss_mask)]
    firsts = batch.tokens.offsets[:-1] + [int(np.argmax(mask)) for mask in batch.loss_mask]
    np.testing.assert_allclose(floats(found.ragged("returns").values[firsts]), expected, rtol=1e-5)
    with pytest.raises(DataError, match=r"gae: kl = 0\.5 needs the columns"):
        await made.advantages(batch, Gae(kl=0.5))


async def test_update_is_the_gradient_of_the_global_batch() -> None:
    batch = rollouts()
    batch = await critic(seed=1).advantages(batch, Gae())
    made, plain = critic(optimizer=OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)), critic()
    metrics = await made.update(batch, ValueLoss(clip=0.2))
    whole = torch.zeros(())
    for row, values in enumerate(by_row(plain, batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        columns = {name: torch.from_numpy(batch.ragged(name)[row].copy()) for name in ("values", "returns")}
        whole = whole + ValueLoss(clip=0.2)(values, columns).values[mask].sum() / int(batch.loss_mask.values.sum())
    whole.backward()
    gradients = [each.grad for each in valued(plain).parameters.values() if each.grad is not None]
    assert len(gradients) == len(valued(plain).parameters)
    assert metrics["loss"] == pytest.approx(whole.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-5)
    assert {"value_error", "value_clip_fraction", "lr"} <= set(metrics)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_critic_learns_what_returns_there_are(dtype: str) -> None:
    made, batch = critic(seed=None, dtype=dtype, optimizer=OptimizerConfig(lr=1e-2)), rollouts()
    batch = await made.advantages(batch, Gae(decay=1))
    before, *_, after = [await made.update(batch, ValueLoss()) for _ in range(60)]
    assert after["loss"] < before["loss"] / 3
    assert explained_variance(before) == pytest.approx(0)
    assert explained_variance(after) > 0.6


async def test_micro_batches_do_not_change_the_step() -> None:
    batch = await critic(seed=1).advantages(rollouts(), Gae())
    one, many = critic(micro_batch_tokens=4096), critic(micro_batch_tokens=16)
    found, expected = await many.update(batch, ValueLoss()), await one.update(batch, ValueLoss())
    assert found.means() == pytest.approx(expected.means(), rel=1e-4)


async def test_a_saved_critic_is_itself_again_and_a_policy_of_its_folder_ignores_the_head(tmp_path: Path) -> None:
    folder = str(tmp_path / "critic")
    made, batch = critic(), rollouts()
    await made.save(folder)
    await made.save(folder)  # over the older one
    again = critic(seed=None, model=folder)
    assert await again.advantages(batch, Gae()) == await made.advantages(batch, Gae())
    await TorchPolicy(PolicyConfig(model=folder)).save(folder)
    assert not np.any((await critic(seed=None, model=folder).advantages(batch, Gae())).ragged("values").values)


async def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    for name, size in ("small", 16), ("large", 32):
        await critic(seed=None, model=MODEL.model_copy(update={"hidden_size": size})).save(str(tmp_path / name))
    (tmp_path / "small" / "value_head.safetensors").replace(tmp_path / "large" / "value_head.safetensors")
    with pytest.raises(ModelError, match=r"'weight': \[1, 16\]}, and not {'bias': \[1\], 'weight': \[1, 32\]}"):
        critic(model=str(tmp_path / "large"))
    (tmp_path / "large" / "value_head.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"value_head.safetensors cannot be read"):
        critic(model=str(tmp_path / "large"))


async def test_another_architecture(tmp_path: Path) -> None:
    await critic().save(str(tmp_path / "tiny"))  # for its tokenizer
    (tmp_path / "tiny" / "value_head.safetensors").unlink()
    shape = GPT2Config(vocab_size=11, n_embd=32, n_layer=2, n_head=4, n_positions=48, eos_token_id=1)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "tiny")
    made, batch = critic(model=str(tmp_path / "tiny")), rollouts()
    expected = torch.cat(by_row(made, batch)).detach().numpy() * batch.loss_mask.values
    found = await made.advantages(batch, Gae())
    np.testing.assert_allclose(floats(found.ragged("values").values), expected, atol=1e-5)


async def test_what_a_critic_cannot_learn_from() -> None:
    tokens, rewards = Ragged.of([[2, 3, 4], [5]], np.int32), np.zeros(2, np.float32)
    batch = Batch.of(tokens=tokens, loss_mask=Ragged.of([[0, 0, 0], [0]], np.bool_), rewards=rewards)
    batch = await critic().advantages(batch, Gae())
    assert not np.any(batch.ragged("returns").values)
    with pytest.raises(DataError, match="nothing to learn"):
        await critic().update(batch, ValueLoss())
    with pytest.raises(DataError, match="CrossEntropy is a loss of `logprobs`"):
        await critic().update(batch, CrossEntropy())
    first = batch.assign(loss_mask=Ragged.of([[0, 1, 1], [1]], np.bool_))
    with pytest.raises(DataError, match="row 1 is True at the first token"):
        await critic().advantages(first, Gae())
    long = Ragged.of([[2] * 49], np.int32)
    too_long = Batch.of(tokens=long, loss_mask=Ragged(np.arange(49) > 3, long.offsets), rewards=rewards[:1])
    with pytest.raises(DataError, match="49 tokens and the model takes at most 48"):
        await critic().advantages(too_long, Gae())


def test_several_ranks_are_refused() -> None:
    rank_context.set(Rank(index=0, size=2, axes={"dp": 0}, shape={"dp": 2}, threads=1))
    with pytest.raises(ContractError, match="TorchCritic trains on one rank, but its mesh has 2"):
        critic()
