import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GraniteConfig, MistralConfig, MixtralConfig

import meshrl as rl
from meshrl.algo import Correction, Normalise, TokenLoss, effective_sample_size, gae
from meshrl.data import Source
from meshrl.errors import ContractError, DataError, ModelError
from meshrl.mesh import Rank, rank_context
from meshrl.roles import OptimizerConfig
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchReference, TorchRewardModel
from meshrl_torch.train.optimizer import learning_rate
from tests.backends.material import GPT2, MODEL, SGD, SHAPE, ModelOf, by_row, floats, near, norm_of, rollouts


def policy(model: object = MODEL, **changes: object) -> TorchPolicy:
    return TorchPolicy(rl.PolicyConfig.model_validate({"model": model, **changes}))


def columns_of(batch: rl.Batch, names: Iterable[str], row: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(batch.ragged(name)[row].copy()) for name in names}


ARCHITECTURES = [
    MistralConfig(**SHAPE, sliding_window=5),  # a window, and fewer key heads
    GraniteConfig(**SHAPE, logits_scaling=0.5),
    MixtralConfig(**SHAPE, num_local_experts=4),
    GPT2Config(**GPT2),
]


async def test_packed_logprobs_equal_transformers_at_any_temperature(small: str, model_of: ModelOf) -> None:
    batch = rollouts()
    cold = batch.assign(temperature=np.full(len(batch), 0.5, np.float32))
    for folder in (small, *map(model_of, ARCHITECTURES)):
        trainer, network = policy(folder, micro_batch_tokens=64), AutoModelForCausalLM.from_pretrained(folder)
        for rows, temperature in ((batch, 1.0), (batch.only("tokens"), 1.0), (cold, 0.5)):
            found = floats((await trainer.logprobs(rows)).ragged("logprobs").values)
            expected = torch.cat(by_row(network, batch, temperature)).detach().numpy()
            np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=folder)


@pytest.mark.parametrize("normalise", get_args(Normalise))
async def test_update_is_the_gradient_of_the_global_batch(normalise: Normalise, small: str) -> None:
    batch = rollouts()
    loss = rl.ClippedLoss(normalise=normalise, constant=9 if normalise == "constant" else None)
    metrics = await policy(small, optimizer=SGD, micro_batch_tokens=40).update(batch, loss)
    plain = AutoModelForCausalLM.from_pretrained(small)
    whole = torch.zeros(())
    learned = sum(bool(mask.any()) for mask in batch.loss_mask)
    tokens = int(batch.loss_mask.values.sum())
    for row, logprobs in enumerate(by_row(plain, batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        advantages = torch.full((len(mask),), float(batch.row("advantages")[row]))
        columns = {**columns_of(batch, ["sampler_logprobs"], row), "advantages": advantages}
        means = {"token-mean": tokens, "sequence-mean": learned * int(mask.sum())}
        divisor = {**means, "sequence-sum": learned, "constant": 9 * learned}
        whole = whole + loss(logprobs, columns).values[mask].sum() / divisor[normalise]
    whole.backward()
    assert metrics["loss"] == pytest.approx(whole.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm_of(plain), rel=1e-5)


async def test_rows_may_be_empty_short_or_longer_than_a_micro_batch(small: str) -> None:
    trainer = policy(small, micro_batch_tokens=4)
    tokens = rl.Ragged.of([[2], [], list(range(2, 11)), [3, 4], [5, 1, 1]], np.int32)
    mask = rl.Ragged.of([[0], [], [0] * 8 + [1], [0, 1], [0, 0, 0]], np.bool_)
    batch = rl.Batch.of(tokens=tokens, loss_mask=mask)
    scored = (await trainer.logprobs(batch)).ragged("logprobs")
    assert scored.lengths.tolist() == [1, 0, 9, 2, 3]
    assert scored[0] == 0
    told = await trainer.update(batch, rl.CrossEntropy())
    assert told["loss"] == pytest.approx(-float(scored[2][-1] + scored[3][-1]) / 2, rel=1e-5)
    assert len((await trainer.logprobs(batch.select([]))).ragged("logprobs")) == 0
    texts = await trainer.encode(rl.Batch.of(prompt=["abc>", "h"], completion=["cba", ""]))
    assert [row.tolist() for row in texts.tokens] == [[2, 3, 4, 10, 4, 3, 2, 1], [9, 1]]
    assert [row.sum() for row in texts.loss_mask] == [4, 1]


async def test_a_saved_folder_is_opened_by_transformers_and_by_a_reference(small: str, tmp_path: Path) -> None:
    trainer, folder, batch = policy(small), tmp_path / "runs" / "model", rollouts()
    await trainer.update(batch, rl.ClippedLoss())
    await trainer.save(str(folder))
    assert AutoTokenizer.from_pretrained(folder)("abc>")["input_ids"] == [2, 3, 4, 10]
    scored = (await trainer.logprobs(batch)).ragged("logprobs")
    expected = torch.cat(by_row(AutoModelForCausalLM.from_pretrained(folder), batch)).detach().numpy()
    np.testing.assert_allclose(floats(scored.values), expected, atol=1e-5)
    reference = TorchReference(rl.ReferenceConfig(model=str(folder)))
    assert (await reference.logprobs(batch)).ragged("reference_logprobs") == scored


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


def test_several_ranks_are_refused() -> None:
    rank_context.set(Rank(index=0, size=2, axes={"dp": 0}, shape={"dp": 2}, threads=1))
    for make in (policy, critic, lambda: TorchRewardModel(rl.RewardTrainingConfig(model=MODEL))):
        with pytest.raises(ContractError, match=r"Torch\w+ trains on one rank, but its mesh has 2"):
            make()


async def test_bfloat16_has_the_gradient_of_float32_but_for_rounding_and_its_weights_travel() -> None:
    half, full = (policy(dtype=dtype, micro_batch_tokens=20) for dtype in ("bfloat16", "float32"))
    weights = await half.weights()
    assert {array.dtype.name for array in weights.tensors.values()} == {"bfloat16"}
    told = [(await each.update(rollouts(), rl.ClippedLoss()))["grad_norm"] for each in (half, full)]
    assert told[0] == pytest.approx(told[1], rel=0.05)
    assert (await half.weights()).fingerprint() != weights.fingerprint()


def learner(micro_batch_tokens: int = 1000) -> TorchPolicy:
    return policy(optimizer=SGD, micro_batch_tokens=micro_batch_tokens)


def sampled(seed: int = 0) -> rl.Batch:
    batch = rollouts(seed=seed)
    logprobs = np.random.default_rng(seed).normal(-2.3, 0.4, len(batch.tokens.values)).astype(np.float32)
    return batch.assign(sampler_logprobs=rl.Ragged(logprobs, batch.tokens.offsets, source=Source("sampler")))


class Named(rl.ClippedLoss):
    name: str

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        return TokenLoss(-logprobs, {self.name: logprobs.detach()})


async def test_a_metric_of_the_updates_own_name_is_refused_before_the_step() -> None:
    trainer = learner()
    for name in ("loss", "grad_norm", "lr", "rows", "tokens"):
        with pytest.raises(DataError, match=f"Named names a metric `{name}`, which every update reports"):
            await trainer.update(sampled(), Named(name=name))
    assert (await trainer.weights()) == (await learner().weights())


async def test_numpys_own_dtypes_are_taken() -> None:
    trainer, wide, batch = learner(), learner(), sampled()
    advantages = np.asarray(batch.row("advantages"), np.float64)
    found = await wide.update(batch.assign(advantages=advantages), rl.ClippedLoss())
    assert found == await trainer.update(batch, rl.ClippedLoss())


async def test_log_probs_say_which_model_computed_them() -> None:
    trainer, reference = learner(), TorchReference(rl.ReferenceConfig(model=MODEL))
    batch = await reference.logprobs(await trainer.logprobs(sampled()))
    assert batch.source("logprobs") == Source.trainer(0)
    assert batch.source("reference_logprobs") == Source("reference")
    await trainer.update(batch, rl.ClippedLoss(anchor="trainer", kl=0.1))
    assert (await trainer.logprobs(batch)).source("logprobs") == Source.trainer(1)


@pytest.mark.parametrize("level", ["token", "sequence"])
async def test_a_corrected_step_does_not_depend_on_micro_batches(level: str) -> None:
    correction = Correction.model_validate({"level": level, "how": "mask", "low": 0.5, "high": 1.5})
    loss = rl.ClippedLoss(anchor="trainer", correction=correction)
    steps = []
    for budget in (1000, 20):
        trainer = learner(budget)
        metrics = await trainer.update(await trainer.logprobs(sampled()), loss)
        steps.append((metrics, await trainer.weights()))
    (one, whole), (several, divided) = steps
    assert several.means() == pytest.approx(one.means(), rel=1e-5, abs=1e-6)
    near(divided, whole, 1e-6)
    assert 0 < one["correction_clipped"] < 1
    assert 0 < effective_sample_size(one) < 1


async def test_the_diagnostics_tell_the_anchor_from_the_sampler() -> None:
    trainer = learner()
    batch = await trainer.logprobs(sampled())
    metrics = await trainer.update(batch, rl.ClippedLoss(anchor="trainer"))
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    mask = torch.from_numpy(np.array(batch.loss_mask.values))
    gap = torch.from_numpy(floats(batch.ragged("logprobs").values) - floats(batch.sampler_logprobs.values))[mask]
    assert metrics["sampler_ratio"] == pytest.approx(gap.exp().mean().item(), rel=1e-5)
    assert metrics["sampler_kl"] == pytest.approx((gap.expm1() - gap).mean().item(), rel=1e-4)


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
