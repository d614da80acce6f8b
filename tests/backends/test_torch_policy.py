import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

import meshrl as rl
from meshrl.algo import Normalise, gae
from meshrl.errors import ModelError
from meshrl.roles import OptimizerConfig
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchReference
from meshrl_torch.train.optimizer import learning_rate
from tests.backends.material import GPT2, MODEL, SGD, ModelOf, by_row, floats, near, norm_of, rollouts


def policy(model: object = MODEL, **changes: object) -> TorchPolicy:
    return TorchPolicy(rl.PolicyConfig.model_validate({"model": model, **changes}))


def columns_of(batch: rl.Batch, names: Iterable[str], row: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(batch.ragged(name)[row].copy()) for name in names}


@pytest.mark.parametrize("normalise", get_args(Normalise))
async def test_update_is_the_gradient_of_the_global_batch(normalise: Normalise, small: str) -> None:
    batch = rollouts()
    loss = rl.ClippedLoss(normalise=normalise, constant=9 if normalise == "constant" else None)
    metrics = await policy(small, optimizer=SGD, micro_batch_tokens=40).update(batch, loss)
    parts = policy(small, optimizer=SGD, micro_batch_tokens=40)
    for rows in ([13, 2], [0, 4, 5, 6, 7, 8, 9], [1, 3, 10, 11, 12]):
        await parts.forward_backward(batch.select(rows), loss)
    in_parts = await parts.step()
    plain = AutoModelForCausalLM.from_pretrained(small)
    whole = torch.zeros(())
    learned = sum(bool(mask.any()) for mask in batch.loss_mask)
    tokens = int(batch.loss_mask.values.sum())
    for row, logprobs in enumerate(by_row(plain, batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        advantages = torch.full((len(mask),), float(batch.row("advantages")[row]))
        columns = {**columns_of(batch, ["sampler_logprobs"], row), "advantages": advantages}
        means = {"token-mean": tokens, "sequence-mean": learned * int(mask.sum())}
        divisor = {**means, "sequence-sum": learned, "constant": 9 * learned, "sum": 1}
        whole = whole + loss(logprobs, columns).values[mask].sum() / divisor[normalise]
    whole.backward()
    for found in (metrics, in_parts):
        assert found["loss"] == pytest.approx(whole.item(), rel=1e-6, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(norm_of(plain), rel=1e-5)
    assert in_parts.means() == pytest.approx(metrics.means(), rel=1e-5, abs=1e-6)


async def test_a_save_that_failed_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, folder = policy(), tmp_path / "model"
    await trainer.save(str(folder))
    before = {each.name: each.read_bytes() for each in folder.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
    await trainer.update(rollouts(), rl.ClippedLoss())
    with pytest.raises(OSError, match="disk full"):
        await trainer.save(str(folder))
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_learning_rates() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, total_steps=14)
    assert [learning_rate(config, step) for step in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    linear = config.model_copy(update={"schedule": "linear"})
    assert [learning_rate(linear, step) for step in (4, 9, 14, 20)] == [1, 0.5, 0, 0]
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, step) for step in (4, 9, 14)] == pytest.approx([1, 0.5, 0])


async def test_advantages_of_any_dtype_teach_the_same() -> None:
    batch, told = rollouts(), list[rl.Metrics]()
    positive = batch.row("advantages").astype(np.float32) > 0
    for dtype in (np.float32, np.float64, np.int8, np.uint8, np.int64, np.bool_):
        told.append(await policy().update(batch.assign(advantages=positive.astype(dtype)), rl.ClippedLoss()))
    assert told == told[:1] * 6


async def test_an_update_is_the_gradient_of_the_pairs_loss_for_any_micro_batches(small: str) -> None:
    pairs, beta = 10, 0.5
    preferred = np.repeat(np.array([1, -1], np.int8), pairs)
    preferred[[3, 3 + pairs]] = 0
    rows = rollouts(2 * pairs).assign(groups=np.tile(np.arange(pairs), 2), preferred=preferred)
    reference = TorchReference(rl.ReferenceConfig(model=MODEL, seed=2))
    batch = await rl.preference_columns(await reference.logprobs(await policy(small).logprobs(rows)))

    network = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float64)
    sums: list[Tensor] = []
    for row, logprobs in enumerate(by_row(network, batch)):
        ratios = logprobs - torch.from_numpy(batch.ragged("reference_logprobs")[row].astype(np.float64))
        sums.append(ratios[torch.from_numpy(batch.loss_mask[row].copy())].sum())
    margins = torch.stack(sums[:pairs]) - torch.stack(sums[pairs:])
    whole = -torch.nn.functional.logsigmoid(beta * margins)[torch.arange(pairs) != 3].sum() / pairs
    whole.backward()

    updated = []
    for budget in (1000, 45, 1):  # 1, 3 and 20 micro-batches
        trainer = policy(small, optimizer=SGD, micro_batch_tokens=budget)
        metrics = await trainer.update(batch, rl.PreferenceLoss(beta=beta))
        assert metrics["loss"] == pytest.approx(whole.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm_of(network), rel=1e-4)
        assert metrics["drift"] == pytest.approx(0, abs=1e-5)
        updated.append(await trainer.weights())
    for other in updated[1:]:
        near(other, updated[0], 1e-6)


def critic(model: object = MODEL, **changes: object) -> TorchCritic:
    return TorchCritic(rl.CriticConfig.model_validate({"model": model, **changes}))


def with_head(model: str, folder: Path) -> str:
    shutil.copytree(model, folder)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) / 4
    save_file({"weight": head, "bias": torch.tensor([0.3])}, folder / "value_head.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def folder(small: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_head(small, tmp_path_factory.mktemp("critic") / "model")


def judged() -> rl.Batch:
    batch = rollouts()
    masks = [mask.copy() for mask in batch.loss_mask]
    for mask in masks[::3]:
        mask[-3:-1] = False
    return batch.assign(loss_mask=rl.Ragged.of(masks, np.bool_), rewards=batch.row("advantages")).drop("advantages")


class PlainCritic:
    def __init__(self, folder: str) -> None:
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.head = torch.nn.Linear(32, 1)
        self.head.load_state_dict(load_file(Path(folder) / "value_head.safetensors"))

    def by_row(self, batch: rl.Batch) -> list[Tensor]:
        rows: list[Tensor] = []
        for tokens in batch.tokens:
            ids = torch.from_numpy(tokens.astype(np.int64))
            states = self.network(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
            rows.append(torch.cat([torch.zeros(1), self.head(states[:-1])[:, 0]]))
        return rows


async def test_values_and_advantages_are_of_each_learned_token(folder: str, model_of: ModelOf, tmp_path: Path) -> None:
    batch = judged()
    for model in (folder, with_head(model_of(GPT2Config(**GPT2)), tmp_path / "critic")):
        found = await critic(model, micro_batch_tokens=64).advantages(batch, rl.Gae(decay=0.9))
        expected = torch.cat(PlainCritic(model).by_row(batch)).detach().numpy() * batch.loss_mask.values
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(floats(found.ragged("values").values), expected, atol=1e-5)
        by_hand = gae(batch.rewards, found.ragged("values"), batch.loss_mask, rl.Gae(decay=0.9))
        assert (found.ragged("advantages"), found.ragged("returns")) == by_hand


async def test_a_new_head_values_nothing_and_a_kl_in_the_reward_reads_the_log_probs() -> None:
    batch, made = judged(), critic()
    assert not np.any((await made.advantages(batch, rl.Gae())).ragged("values").values)
    size = len(batch.tokens.values)
    zeros, ones = (rl.Ragged(np.full(size, each, np.float32), batch.tokens.offsets) for each in (0, 1))
    found = await made.advantages(batch.assign(logprobs=ones, reference_logprobs=zeros), rl.Gae(decay=1, kl=0.5))
    expected = [float(batch.rewards[row]) - 0.5 * int(mask.sum()) for row, mask in enumerate(batch.loss_mask)]
    firsts = batch.tokens.offsets[:-1] + [int(np.argmax(mask)) for mask in batch.loss_mask]
    np.testing.assert_allclose(floats(found.ragged("returns").values[firsts]), expected, rtol=1e-5)


async def test_update_is_the_gradient_of_the_global_batch_for_any_micro_batches(folder: str) -> None:
    loss = rl.ValueLoss(clip=0.2)
    values = rl.Ragged(np.full(len(judged().tokens.values), 0.1, np.float32), judged().tokens.offsets)
    batch = (await critic().advantages(judged(), rl.Gae())).assign(values=values)  # from which the critic is far
    plain, whole = PlainCritic(folder), torch.zeros(())
    for row, predicted in enumerate(plain.by_row(batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        found = loss(predicted, columns_of(batch, ["values", "returns"], row)).values[mask].sum()
        whole = whole + found / int(batch.loss_mask.values.sum())
    whole.backward()
    norm = float(np.hypot(norm_of(plain.network), norm_of(plain.head)))
    for budget in (4096, 16):
        metrics = await critic(folder, optimizer=SGD, micro_batch_tokens=budget).update(batch, loss)
        assert metrics["loss"] == pytest.approx(whole.item(), abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert {"value_error", "value_clip_fraction", "lr"} <= set(metrics)


async def test_a_saved_critic_is_itself_again_and_a_policy_ignores_its_head(folder: str, tmp_path: Path) -> None:
    saved, batch, made = str(tmp_path / "critic"), judged(), critic(folder)
    await made.save(saved)
    assert await critic(saved).advantages(batch, rl.Gae()) == await made.advantages(batch, rl.Gae())
    (tmp_path / "critic/value_head.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match="cannot be read"):
        critic(saved)
    await TorchPolicy(rl.PolicyConfig(model=saved)).save(saved)
    assert not np.any((await critic(saved).advantages(batch, rl.Gae())).ragged("values").values)
