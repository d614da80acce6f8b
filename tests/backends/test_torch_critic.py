"""The torch critic: values and gradients equal transformers' hidden states and a linear layer, row by row."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from meshrl import Batch, CriticConfig, Gae, PolicyConfig, Ragged, ValueLoss, gae
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from tests.backends import material
from tests.backends.material import MODEL, columns_of, floats, norm_of


def critic(model: object = MODEL, **changes: object) -> TorchCritic:
    return TorchCritic(CriticConfig.model_validate({"model": model, **changes}))


def with_head(model: str, folder: Path) -> str:
    """A critic's folder: a model with a head that is not zero."""
    shutil.copytree(model, folder)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) / 4
    save_file({"weight": head, "bias": torch.tensor([0.3])}, folder / "value_head.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def folder(small: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_head(small, tmp_path_factory.mktemp("critic") / "model")


def rollouts() -> Batch:
    """Rows with shared prompts, some of two turns: what stands between them is not learned."""
    batch = material.rollouts()
    masks = [mask.copy() for mask in batch.loss_mask]
    for mask in masks[::3]:
        mask[-3:-1] = False
    return batch.assign(loss_mask=Ragged.of(masks, np.bool_), rewards=batch.row("advantages")).drop("advantages")


class Plain:
    """A critic of transformers' model with its own attention, and a linear layer."""

    def __init__(self, folder: str) -> None:
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        head = load_file(Path(folder) / "value_head.safetensors")
        self.head = torch.nn.Linear(32, 1)
        self.head.load_state_dict(head)

    def by_row(self, batch: Batch) -> list[Tensor]:
        """The value before each token, one row at a time."""
        rows: list[Tensor] = []
        for tokens in batch.tokens:
            ids = torch.from_numpy(tokens.astype(np.int64))
            states = self.network(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
            rows.append(torch.cat([torch.zeros(1), self.head(states[:-1])[:, 0]]))
        return rows


async def test_values_are_those_before_each_learned_token_and_advantages_follow_from_them(
    folder: str, random_model: Callable[..., str], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"vocab_size": 11, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
    gpt2 = random_model(GPT2Config(**sizes, bos_token_id=None, eos_token_id=1), tmp_path / "gpt2")
    batch = rollouts()
    for model in (folder, with_head(gpt2, tmp_path / "critic")):
        found = await critic(model, micro_batch_tokens=64).advantages(batch, Gae(decay=0.9))
        expected = torch.cat(Plain(model).by_row(batch)).detach().numpy() * batch.loss_mask.values
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(floats(found.ragged("values").values), expected, atol=1e-5)
        by_hand = gae(batch.rewards, found.ragged("values"), batch.loss_mask, Gae(decay=0.9))
        assert (found.ragged("advantages"), found.ragged("returns")) == by_hand


async def test_a_new_head_values_nothing_and_a_kl_in_the_reward_reads_the_log_probs() -> None:
    batch, made = rollouts(), critic()
    assert not np.any((await made.advantages(batch, Gae())).ragged("values").values)
    zeros = Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets)
    ones = Ragged(np.ones(len(batch.tokens.values), np.float32), batch.tokens.offsets)
    found = await made.advantages(batch.assign(logprobs=ones, reference_logprobs=zeros), Gae(decay=1, kl=0.5))
    expected = [float(batch.rewards[row]) - 0.5 * int(mask.sum()) for row, mask in enumerate(batch.loss_mask)]
    firsts = batch.tokens.offsets[:-1] + [int(np.argmax(mask)) for mask in batch.loss_mask]
    np.testing.assert_allclose(floats(found.ragged("returns").values[firsts]), expected, rtol=1e-5)


async def test_update_is_the_gradient_of_the_global_batch_for_any_micro_batches(folder: str) -> None:
    loss = ValueLoss(clip=0.2)
    values = Ragged(np.full(len(rollouts().tokens.values), 0.1, np.float32), rollouts().tokens.offsets)
    batch = (await critic().advantages(rollouts(), Gae())).assign(values=values)  # from which the critic is far
    plain, whole = Plain(folder), torch.zeros(())
    for row, predicted in enumerate(plain.by_row(batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        judged = loss(predicted, columns_of(batch, ["values", "returns"], row)).values[mask].sum()
        whole = whole + judged / int(batch.loss_mask.values.sum())
    whole.backward()
    norm = float(np.hypot(norm_of(plain.network), norm_of(plain.head)))
    for budget in (4096, 16):
        metrics = await critic(folder, optimizer=material.SGD, micro_batch_tokens=budget).update(batch, loss)
        assert metrics["loss"] == pytest.approx(whole.item(), abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert {"value_error", "value_clip_fraction", "lr"} <= set(metrics)


async def test_a_saved_critic_is_itself_again_and_a_policy_of_its_folder_ignores_the_head(
    folder: str, tmp_path: Path
) -> None:
    saved, batch, made = str(tmp_path / "critic"), rollouts(), critic(folder)
    await made.save(saved)
    assert await critic(saved).advantages(batch, Gae()) == await made.advantages(batch, Gae())
    await TorchPolicy(PolicyConfig(model=saved)).save(saved)
    assert not np.any((await critic(saved).advantages(batch, Gae())).ragged("values").values)
