"""The torch policy: packed training equals what transformers computes row by row."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from meshrl import (
    Batch,
    ClippedLoss,
    CrossEntropy,
    NewModel,
    OptimizerConfig,
    PolicyConfig,
    Ragged,
    ReferenceConfig,
)
from meshrl.errors import ContractError, DataError
from meshrl.losses import Normalise
from meshrl.mesh import Rank, rank_context
from meshrl_hf.model import LanguageModel
from meshrl_hf.optimizer import learning_rate
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "eos_token_id": 1,
}
SGD = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)
"""With so large an epsilon Adam's first step is nearly the gradient: weights differ by what gradients do."""


def policy(**changes: object) -> TorchPolicy:
    made = TorchPolicy(PolicyConfig.model_validate({"model": MODEL, **changes}))
    with torch.no_grad():  # far from the initialisation, where all log-probs are about equal
        for parameter in model_of(made).network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return made


def model_of(made: TorchPolicy | TorchReference) -> LanguageModel:
    return made._passes.model


def floats(array: np.ndarray[Any, Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def rollouts(rows: int = 14, prompts: int = 4, seed: int = 0) -> Batch:
    """Rows with shared prompts, and a few alone: prompt and completion of 1 to 9 tokens."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(2, 11, rng.integers(1, 9)) for _ in range(prompts)]
    pairs = [(heads[rng.integers(prompts)], rng.integers(1, 11, rng.integers(1, 10))) for _ in range(rows)]
    tokens = Ragged.of([np.concatenate(pair) for pair in pairs], np.int32)
    mask = Ragged.of([np.arange(len(a) + len(b)) >= len(a) for a, b in pairs], np.bool_)
    return Batch.of(
        tokens=tokens,
        loss_mask=mask,
        sampler_logprobs=Ragged(rng.normal(-2, 0.3, len(tokens.values)).astype(np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


def by_row(model: LanguageModel, batch: Batch) -> list[Tensor]:
    """Log-probs of each row by transformers' own attention, one row at a time."""
    model.network.set_attn_implementation("eager")
    rows: list[Tensor] = []
    for row in range(len(batch)):
        ids = torch.from_numpy(batch.tokens[row].astype(np.int64))
        logprobs = model.network(input_ids=ids[None]).logits[0].log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]]))
    model.network.set_attn_implementation("meshrl")
    return rows


@pytest.mark.parametrize("masked", [True, False])
async def test_packed_logprobs_equal_transformers(masked: bool) -> None:
    trainer, batch = policy(micro_batch_tokens=64), rollouts()
    scored = await trainer.logprobs(batch if masked else batch.only("tokens"))
    expected = torch.cat(by_row(model_of(trainer), batch)).detach().numpy()
    np.testing.assert_allclose(floats(scored.ragged("logprobs").values), expected, atol=1e-5)


ARCHITECTURES: list[PreTrainedModel] = [
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),  # a window, and fewer key heads
    GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.5)),
    MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
    GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=32, n_layer=2, n_head=4, n_positions=48, eos_token_id=1)),
]


@pytest.mark.parametrize("network", ARCHITECTURES, ids=lambda network: type(network).__name__)
async def test_other_architectures_equal_transformers(network: PreTrainedModel, tmp_path: Path) -> None:
    await policy().save(str(tmp_path / "tiny"))  # for its tokenizer
    network.save_pretrained(tmp_path / "tiny")
    trainer, batch = policy(model=str(tmp_path / "tiny")), rollouts()
    scored = await trainer.logprobs(batch)
    expected = torch.cat(by_row(model_of(trainer), batch)).detach().numpy()
    np.testing.assert_allclose(floats(scored.ragged("logprobs").values), expected, atol=1e-5)


@pytest.mark.parametrize("normalise", ["token-mean", "sequence-mean", "sequence-sum", "constant"])
async def test_update_is_the_gradient_of_the_global_batch(normalise: Normalise) -> None:
    batch = rollouts()
    loss = ClippedLoss(normalise=normalise, constant=9 if normalise == "constant" else None)
    trainer, plain = policy(optimizer=SGD), model_of(policy())
    metrics = await trainer.update(batch, loss)
    whole = torch.zeros(())
    learned = sum(bool(mask.any()) for mask in batch.loss_mask)
    for row, logprobs in enumerate(by_row(plain, batch)):
        mask = torch.from_numpy(batch.loss_mask[row].copy())
        advantages = torch.full((len(mask),), float(batch.row("advantages")[row]))
        old = torch.from_numpy(batch.sampler_logprobs[row].copy())
        values = loss(logprobs, {"sampler_logprobs": old, "advantages": advantages}).values[mask].sum()
        tokens = int(batch.loss_mask.values.sum())
        divisor = {
            "token-mean": tokens,
            "sequence-mean": learned * int(mask.sum()),
            "sequence-sum": learned,
            "constant": 9 * learned,
        }
        whole = whole + values / divisor[normalise]
    whole.backward()
    gradients = [parameter.grad for parameter in plain.network.parameters() if parameter.grad is not None]
    assert metrics["loss"] == pytest.approx(whole.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-5)


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each forward pass from now on."""
    made: list[int] = []
    forward = LanguageModel.hidden

    def counted(self: LanguageModel, ids: Tensor, *rest: Any) -> Tensor:
        made.append(ids.numel())
        return forward(self, ids, *rest)

    monkeypatch.setattr(LanguageModel, "hidden", counted)
    return made


@pytest.mark.parametrize("normalise", ["token-mean", "sequence-mean"])
async def test_the_step_is_the_same_for_1_3_and_7_micro_batches(
    normalise: Normalise, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollouts(rows=28, prompts=12)
    weights: list[Mapping[str, np.ndarray]] = []
    norms: list[float] = []
    for budget, count in ((1000, 1), (63, 3), (30, 7)):
        trainer = policy(optimizer=SGD, micro_batch_tokens=budget)
        made = passes(monkeypatch)
        norms.append((await trainer.update(batch, ClippedLoss(normalise=normalise)))["grad_norm"])
        assert len(made) == count
        assert max(made) <= budget
        weights.append((await trainer.weights()).tensors)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
    for other in weights[1:]:
        for name, array in weights[0].items():
            np.testing.assert_allclose(other[name], array, rtol=0, atol=1e-6)


async def test_a_shared_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Ragged.of([[2, 3, 4, 5, *range(2, 2 + n)] for n in (3, 3, 5)], np.int32)
    mask = Ragged.of([[False] * 4 + [True] * n for n in (3, 3, 5)], np.bool_)
    trainer = policy()
    made = passes(monkeypatch)
    await trainer.update(Batch.of(tokens=tokens, loss_mask=mask), CrossEntropy())
    assert made == [4 + 2 + 2 + 4]  # the prompt, and each completion but its last token


async def test_limits_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = policy(micro_batch_tokens=4)
    made = passes(monkeypatch)
    tokens = Ragged.of([[2], [], list(range(2, 11)), [3, 4], [5, 1, 1]], np.int32)
    mask = Ragged.of([[0], [], [0] * 8 + [1], [0, 1], [0, 0, 0]], np.bool_)
    batch = Batch.of(tokens=tokens, loss_mask=mask)
    await trainer.update(batch, CrossEntropy())
    assert sorted(made) == [1, 8]  # a row over the budget is a pass of its own; rows with nothing to learn are none
    scored = (await trainer.logprobs(batch)).ragged("logprobs")
    assert scored.lengths.tolist() == [1, 0, 9, 2, 3]
    assert scored[0] == 0
    assert floats(scored[2][1:]).max() < 0


async def test_no_rows() -> None:
    trainer, none = policy(), rollouts().select([])
    assert len((await trainer.logprobs(none)).ragged("logprobs")) == 0
    assert len(await trainer.encode(Batch.of(prompt=[], completion=[]))) == 0
    with pytest.raises(DataError, match="nothing to learn"):
        await trainer.update(none, CrossEntropy())


async def test_encode() -> None:
    batch = await policy().encode(Batch.of(prompt=["abc>", "h"], completion=["cba", ""]))
    assert [row.tolist() for row in batch.tokens] == [[2, 3, 4, 10, 4, 3, 2, 1], [9, 1]]
    assert [row.sum() for row in batch.loss_mask] == [4, 1]


async def test_temperature_divides_the_logits() -> None:
    trainer, batch = policy(), rollouts()
    cold = await trainer.logprobs(batch.assign(temperature=np.full(len(batch), 0.5, np.float32)))
    ids = torch.from_numpy(batch.tokens[0].astype(np.int64))
    model = model_of(trainer).network.set_attn_implementation("eager") or model_of(trainer).network
    expected = (model(input_ids=ids[None]).logits[0] / 0.5).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(floats(cold.ragged("logprobs")[0][1:]), expected.detach().numpy(), atol=1e-5)


async def test_chunked_logits_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, steps = rollouts(), []
    for limit in (1 << 25, 50):
        monkeypatch.setattr("meshrl_hf.model.MAX_LOGITS", limit)
        trainer = policy(optimizer=SGD)
        steps.append((await trainer.update(batch, ClippedLoss()), await trainer.weights()))
    assert steps[1][0]["grad_norm"] == pytest.approx(steps[0][0]["grad_norm"], rel=1e-6)


async def test_activation_checkpointing_gives_the_same_step() -> None:
    batch = rollouts()
    norms = [
        (await policy(activation_checkpointing=on).update(batch, ClippedLoss()))["grad_norm"] for on in (False, True)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


async def test_it_learns() -> None:
    trainer = TorchPolicy(PolicyConfig(model=MODEL, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=5)))
    batch = await trainer.encode(Batch.of(prompt=["abc>", "fgh>"], completion=["cba", "hgf"]))
    losses = [(await trainer.update(batch, CrossEntropy()))["loss"] for _ in range(60)]
    assert losses[0] > 2
    assert losses[-1] < 0.2
    assert (await trainer.weights()).version == 60


async def test_the_reference_scores_like_the_policy(tmp_path: Path) -> None:
    trainer, batch = policy(), rollouts()
    await trainer.save(str(tmp_path / "model"))
    reference = TorchReference(ReferenceConfig(model=str(tmp_path / "model")))
    expected = (await trainer.logprobs(batch)).ragged("logprobs")
    assert (await reference.logprobs(batch)).ragged("reference_logprobs") == expected


async def test_save_is_a_folder_that_transformers_opens(tmp_path: Path) -> None:
    trainer, folder = policy(), tmp_path / "runs" / "model"
    await trainer.save(str(folder))
    await trainer.save(str(folder))  # replaces what it wrote
    assert [each.name for each in folder.parent.iterdir()] == ["model"]
    network = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("abc>", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[2, 3, 4, 10]]
    batch = Batch.of(tokens=Ragged.of(ids.tolist(), np.int32))
    expected = network(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(floats((await trainer.logprobs(batch)).ragged("logprobs")[0][1:]), expected, atol=1e-5)


async def test_a_failed_save_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, folder = policy(), tmp_path / "model"
    await trainer.save(str(folder))
    before = sorted(each.name for each in folder.iterdir())

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(model_of(trainer).tokenizer), "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        await trainer.save(str(folder))
    assert sorted(each.name for each in folder.iterdir()) == before
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


async def test_a_row_that_is_too_long() -> None:
    batch = Batch.of(tokens=Ragged.of([[2] * 49], np.int32))
    with pytest.raises(DataError, match="49 tokens and the model takes at most 48"):
        await policy().logprobs(batch)


async def test_bfloat16_weights_travel() -> None:
    trainer = policy(dtype="bfloat16")
    weights = await trainer.weights()
    assert {array.dtype.name for array in weights.tensors.values()} == {"bfloat16"}
    await trainer.update(rollouts(), ClippedLoss())
    assert (await trainer.weights()).fingerprint() != weights.fingerprint()
