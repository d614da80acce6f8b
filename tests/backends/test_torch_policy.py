"""The torch policy: packed training equals what transformers computes row by row."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GraniteConfig, MistralConfig, MixtralConfig

import meshrl as rl
from meshrl.errors import ContractError
from meshrl.losses import Normalise
from meshrl.mesh import Rank, rank_context
from meshrl_hf.optimizer import learning_rate
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference
from meshrl_torch.reward_model import TorchRewardModel
from tests.backends.material import MODEL, SGD, SHAPE, by_row, columns_of, floats, norm_of, rollouts


def policy(model: object = MODEL, **changes: object) -> TorchPolicy:
    return TorchPolicy(rl.PolicyConfig.model_validate({"model": model, **changes}))


GPT2: Mapping[str, Any] = {"vocab_size": 11, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
ARCHITECTURES = [
    MistralConfig(**SHAPE, sliding_window=5),  # a window, and fewer key heads
    GraniteConfig(**SHAPE, logits_scaling=0.5),
    MixtralConfig(**SHAPE, num_local_experts=4),
    GPT2Config(**GPT2, bos_token_id=None, eos_token_id=1),
]


async def test_packed_logprobs_equal_transformers_at_any_temperature(
    small: str, random_model: Callable[..., str], tmp_path: Path
) -> None:
    batch = rollouts()
    cold = batch.assign(temperature=np.full(len(batch), 0.5, np.float32))
    for folder in (small, *(random_model(shape, tmp_path / shape.model_type) for shape in ARCHITECTURES)):
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
    config = rl.OptimizerConfig(lr=1.0, warmup_steps=4, total_steps=14)
    assert [learning_rate(config, step) for step in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    linear = config.model_copy(update={"schedule": "linear"})
    assert [learning_rate(linear, step) for step in (4, 9, 14, 20)] == [1, 0.5, 0, 0]
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, step) for step in (4, 9, 14)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize(
    ("role", "config"),
    [(TorchPolicy, rl.PolicyConfig), (TorchCritic, rl.CriticConfig), (TorchRewardModel, rl.RewardTrainingConfig)],
)
def test_several_ranks_are_refused(role: Callable[[rl.ModelConfig], object], config: type[rl.ModelConfig]) -> None:
    rank_context.set(Rank(index=0, size=2, axes={"dp": 0}, shape={"dp": 2}, threads=1))
    with pytest.raises(ContractError, match=f"{role.__name__} trains on one rank, but its mesh has 2"):
        role(config(model=MODEL))


async def test_bfloat16_has_the_gradient_of_float32_but_for_rounding_and_its_weights_travel() -> None:
    half, full = (policy(dtype=dtype, micro_batch_tokens=20) for dtype in ("bfloat16", "float32"))
    weights = await half.weights()
    assert {array.dtype.name for array in weights.tensors.values()} == {"bfloat16"}
    told = [(await each.update(rollouts(), rl.ClippedLoss()))["grad_norm"] for each in (half, full)]
    assert told[0] == pytest.approx(told[1], rel=0.05)
    assert (await half.weights()).fingerprint() != weights.fingerprint()
