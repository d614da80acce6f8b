"""The torch policy: packed training equals what transformers computes row by row."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
)

from meshrl import Batch, ClippedLoss, CrossEntropy, OptimizerConfig, PolicyConfig, Ragged, ReferenceConfig
from meshrl.errors import ContractError, DataError
from meshrl.losses import Normalise
from meshrl.mesh import Rank, rank_context
from meshrl_hf.optimizer import learning_rate
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference
from tests.backends.material import MODEL, SGD, SHAPE, by_row, columns_of, floats, norm_of, rollouts


def policy(model: object = MODEL, **changes: object) -> TorchPolicy:
    return TorchPolicy(PolicyConfig.model_validate({"model": model, **changes}))


ARCHITECTURES: Mapping[str, PretrainedConfig] = {
    "mistral": MistralConfig(**SHAPE, sliding_window=5),  # a window, and fewer key heads
    "granite": GraniteConfig(**SHAPE, logits_scaling=0.5),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "gpt2": GPT2Config(
        vocab_size=11, n_embd=32, n_layer=2, n_head=4, n_positions=48, bos_token_id=None, eos_token_id=1
    ),
}


@pytest.mark.parametrize("name", ["llama", *ARCHITECTURES])
async def test_packed_logprobs_equal_transformers_at_any_temperature(
    name: str, small: str, random_model: Callable[..., str], tmp_path: Path
) -> None:
    folder = small if name == "llama" else random_model(ARCHITECTURES[name], tmp_path / "model")
    trainer, batch = policy(folder, micro_batch_tokens=64), rollouts()
    network = AutoModelForCausalLM.from_pretrained(folder)
    expected = torch.cat(by_row(network, batch)).detach().numpy()
    for scored in (await trainer.logprobs(batch), await trainer.logprobs(batch.only("tokens"))):
        np.testing.assert_allclose(floats(scored.ragged("logprobs").values), expected, atol=1e-5)
    cold = await trainer.logprobs(batch.assign(temperature=np.full(len(batch), 0.5, np.float32)))
    expected = torch.cat(by_row(network, batch, temperature=0.5)).detach().numpy()
    np.testing.assert_allclose(floats(cold.ragged("logprobs").values), expected, atol=2e-5)


@pytest.mark.parametrize("normalise", get_args(Normalise))
async def test_update_is_the_gradient_of_the_global_batch(normalise: Normalise, small: str) -> None:
    batch = rollouts()
    loss = ClippedLoss(normalise=normalise, constant=9 if normalise == "constant" else None)
    metrics = await policy(small, optimizer=SGD).update(batch, loss)
    plain = AutoModelForCausalLM.from_pretrained(small)
    whole = torch.zeros(())
    learned = sum(bool(mask.any()) for mask in batch.loss_mask)
    tokens = int(batch.loss_mask.values.sum())
    for row, logprobs in enumerate(by_row(plain, batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        advantages = torch.full((len(mask),), float(batch.row("advantages")[row]))
        columns = {**columns_of(batch, ["sampler_logprobs"], row), "advantages": advantages}
        divisor = {
            "token-mean": tokens,
            "sequence-mean": learned * int(mask.sum()),
            "sequence-sum": learned,
            "constant": 9 * learned,
        }
        whole = whole + loss(logprobs, columns).values[mask].sum() / divisor[normalise]
    whole.backward()
    assert metrics["loss"] == pytest.approx(whole.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm_of(plain), rel=1e-5)


@pytest.mark.parametrize("normalise", ["token-mean", "sequence-mean"])
async def test_the_step_is_the_same_for_any_micro_batches_and_with_recomputed_activations(normalise: Normalise) -> None:
    batch = rollouts(rows=28, prompts=12)
    weights: list[Mapping[str, np.ndarray]] = []
    norms: list[float] = []
    for budget, recomputed in ((1000, False), (63, False), (30, True)):
        trainer = policy(optimizer=SGD, micro_batch_tokens=budget, activation_checkpointing=recomputed)
        norms.append((await trainer.update(batch, ClippedLoss(normalise=normalise)))["grad_norm"])
        weights.append((await trainer.weights()).tensors)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
    for other in weights[1:]:
        for name, array in weights[0].items():
            np.testing.assert_allclose(other[name], array, rtol=0, atol=1e-6)


async def test_rows_may_be_empty_short_or_longer_than_a_micro_batch(small: str) -> None:
    trainer = policy(small, micro_batch_tokens=4)
    tokens = Ragged.of([[2], [], list(range(2, 11)), [3, 4], [5, 1, 1]], np.int32)
    mask = Ragged.of([[0], [], [0] * 8 + [1], [0, 1], [0, 0, 0]], np.bool_)
    batch = Batch.of(tokens=tokens, loss_mask=mask)
    scored = (await trainer.logprobs(batch)).ragged("logprobs")
    assert scored.lengths.tolist() == [1, 0, 9, 2, 3]
    assert scored[0] == 0
    told = await trainer.update(batch, CrossEntropy())
    assert told["loss"] == pytest.approx(-float(scored[2][-1] + scored[3][-1]) / 2, rel=1e-5)
    none = rollouts().select([])
    assert len((await trainer.logprobs(none)).ragged("logprobs")) == 0
    assert len(await trainer.encode(Batch.of(prompt=[], completion=[]))) == 0
    with pytest.raises(DataError, match="nothing to learn"):
        await trainer.update(none, CrossEntropy())


async def test_it_learns_texts() -> None:
    trainer = policy(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=5))
    batch = await trainer.encode(Batch.of(prompt=["abc>", "h"], completion=["cba", ""]))
    assert [row.tolist() for row in batch.tokens] == [[2, 3, 4, 10, 4, 3, 2, 1], [9, 1]]
    assert [row.sum() for row in batch.loss_mask] == [4, 1]
    losses = [(await trainer.update(batch, CrossEntropy()))["loss"] for _ in range(40)]
    assert losses[0] > 2
    assert losses[-1] < 0.2
    assert (await trainer.weights()).version == 40


async def test_a_saved_folder_is_opened_by_transformers_and_by_a_reference(small: str, tmp_path: Path) -> None:
    trainer, folder, batch = policy(small), tmp_path / "runs" / "model", rollouts()
    await trainer.update(batch, ClippedLoss())
    await trainer.save(str(folder))
    await trainer.save(str(folder))  # replaces what it wrote
    assert [each.name for each in folder.parent.iterdir()] == ["model"]
    assert AutoTokenizer.from_pretrained(folder)("abc>")["input_ids"] == [2, 3, 4, 10]
    scored = (await trainer.logprobs(batch)).ragged("logprobs")
    expected = torch.cat(by_row(AutoModelForCausalLM.from_pretrained(folder), batch)).detach().numpy()
    np.testing.assert_allclose(floats(scored.values), expected, atol=1e-5)
    reference = TorchReference(ReferenceConfig(model=str(folder)))
    assert (await reference.logprobs(batch)).ragged("reference_logprobs") == scored


async def test_a_save_that_failed_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, folder = policy(), tmp_path / "model"
    await trainer.save(str(folder))
    before = {each.name: each.read_bytes() for each in folder.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
    await trainer.update(rollouts(), ClippedLoss())
    with pytest.raises(OSError, match="disk full"):
        await trainer.save(str(folder))
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.bits
async def test_the_same_seed_gives_the_same_bits() -> None:
    prints: list[str] = []
    for _ in range(2):
        trainer = policy(seed=3)
        for seed in range(3):
            await trainer.update(rollouts(seed=seed), ClippedLoss())
        prints.append((await trainer.weights()).fingerprint())
    assert prints[0] == prints[1]
    assert (await policy(seed=4).weights()).fingerprint() != (await policy(seed=3).weights()).fingerprint()


def test_learning_rates() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, total_steps=14)
    assert [learning_rate(config, step) for step in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    linear = config.model_copy(update={"schedule": "linear"})
    assert [learning_rate(linear, step) for step in (4, 9, 14, 20)] == [1, 0.5, 0, 0]
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, step) for step in (4, 9, 14)] == pytest.approx([1, 0.5, 0])


def test_several_ranks_are_refused() -> None:
    rank_context.set(Rank(index=0, size=2, axes={"dp": 0}, shape={"dp": 2}, threads=1))
    with pytest.raises(ContractError, match="one rank"):
        policy()


async def test_weights_in_bfloat16_travel() -> None:
    trainer = policy(dtype="bfloat16")
    weights = await trainer.weights()
    assert {array.dtype.name for array in weights.tensors.values()} == {"bfloat16"}
    await trainer.update(rollouts(), ClippedLoss())
    assert (await trainer.weights()).fingerprint() != weights.fingerprint()
