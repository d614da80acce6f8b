"""The torch sampler: what it draws, what it says of it, and that slots do not matter. More is in tests/conformance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, PretrainedConfig

from meshrl import Batch, PolicyConfig, SamplerConfig, Sampling, Weights
from meshrl.errors import DataError, ModelError
from meshrl.weights import Bucket
from meshrl_hf.seeds import key
from meshrl_torch.draw import Draw, uniforms
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler
from tests.backends.material import SHAPE, floats

PROMPTS = Batch.of(prompt=["abc>", "h>", "abcdefgh>", "bad>", "c"], groups=np.arange(10, 15))


def sampler(folder: str, slots: int = 512, **changes: object) -> TorchSampler:
    return TorchSampler(SamplerConfig.model_validate({"model": folder, "slots": slots, **changes}))


async def parts(made: TorchSampler, prompts: Batch, sampling: Sampling) -> list[Batch]:
    return [part async for part in made.generate(prompts, sampling)]


async def rollout(made: TorchSampler, sampling: Sampling, prompts: Batch = PROMPTS) -> Batch:
    """All rows in the order of the prompts."""
    return Batch.join(await parts(made, prompts.part(np.arange(len(prompts))), sampling))


WINDOWED = MistralConfig(**SHAPE, sliding_window=4)
"""With fewer key heads than query heads too."""
GPT2 = GPT2Config(vocab_size=11, n_embd=32, n_layer=2, n_head=4, n_positions=48, eos_token_id=1, bos_token_id=None)
"""With learned positions, and dropout in its configuration."""


@pytest.mark.parametrize("config", [WINDOWED, GPT2], ids=["windowed", "gpt2"])
async def test_greedy_equals_transformers(
    config: PretrainedConfig, random_model: Callable[..., str], tmp_path: Path
) -> None:
    folder = random_model(config, tmp_path / "model")
    batch = await rollout(sampler(folder, slots=3), Sampling(max_tokens=20, temperature=0))
    network: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for row, tokens in enumerate(batch.tokens):
        prompt = torch.from_numpy(tokens[np.logical_not(batch.loss_mask[row])].astype(np.int64))[None]
        expected = network.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert tokens.tolist() == expected[0].tolist()


async def test_draws_do_not_depend_on_slots_nor_on_how_a_mesh_divides_the_rows(small: str) -> None:
    sampling = Sampling(n=6, max_tokens=16)
    whole = await rollout(sampler(small), sampling)
    for slots in (7, 1):
        other = await rollout(sampler(small, slots), sampling)
        assert other.tokens == whole.tokens
        assert other.objects("completion") == whole.objects("completion")
        logprobs = floats(whole.sampler_logprobs.values)
        np.testing.assert_allclose(floats(other.sampler_logprobs.values), logprobs, atol=1e-5)
    divided = [part for half in PROMPTS.split(2) for part in await parts(sampler(small), half, sampling)]
    assert Batch.join(divided).tokens == whole.tokens


async def test_rows_come_as_they_finish_and_go_back_in_order(small: str) -> None:
    limits = np.array([30, 1, 20, 3, 30, 2, 8, 12, 1, 25])
    prompts = Batch.concat([PROMPTS, PROMPTS]).assign(max_tokens=limits)
    whole = await parts(sampler(small, slots=3), prompts.part(np.arange(10)), Sampling(ignore_eos=True))
    assert len(whole) > 2
    arrived = [text for part in whole for text in part.objects("prompt")]
    assert arrived != list(prompts.objects("prompt"))
    batch = Batch.join(whole)
    assert batch.objects("prompt") == prompts.objects("prompt")
    assert [int(mask.sum()) for mask in batch.loss_mask] == limits.tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3]).log()
    rows = np.arange(40_000)
    for restrict, kept in (({}, [0, 2, 3, 4]), ({"top_k": 2}, [2, 4]), ({"top_p": 0.75}, [2, 3, 4])):
        draw = Draw(Sampling.model_validate(restrict), key(0, 1))
        tokens, logprobs = draw(logits.expand(len(rows), -1), rows, np.zeros_like(rows))
        expected = torch.zeros(5)
        expected[kept] = logits.exp()[kept]
        shares = torch.bincount(tokens, minlength=5) / len(rows)
        torch.testing.assert_close(shares, expected / expected.sum(), atol=0.01, rtol=0)
        torch.testing.assert_close(logprobs, logits[tokens])


def test_numbers_that_draws_hang_on_are_uniform_and_independent() -> None:
    rows, places = np.divmod(np.arange(100_000), 100)
    numbers = uniforms(key(1, 2, 3), rows, places)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] / 5000 - 1).max() < 0.06
    table = numbers.reshape(1000, 100)
    assert np.abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.01
    assert np.abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.01
    assert key(1, 2) != key(2, 1)


async def test_weights_that_did_not_arrive_are_not_drawn_from(small: str) -> None:
    made, weights = sampler(small), await TorchPolicy(PolicyConfig(model=small)).weights()
    greedy = Sampling(temperature=0, max_tokens=16)
    assert (await made.load(weights)).row("difference").max() < 1e-5
    (bucket,) = weights.buckets
    name = next(iter(bucket.index))
    memory = bucket.memory.copy()
    memory[bucket.index[name].start :][:64] = 1
    damaged = Weights.of(8, [Bucket(bucket.index, bucket.nbytes, memory)])
    before = await rollout(made, greedy)
    with pytest.raises(ModelError, match=rf"version 8 did not arrive as they were sent: 1 tensors differ \({name}\)"):
        await made.load(damaged)
    assert (await rollout(made, greedy)).tokens == before.tokens, "the old ones stay"
    others = {name: np.multiply(array, 1.5, dtype=np.float32) for name, array in weights.tensors.items()}
    with pytest.raises(ModelError, match=r"version 9 arrived, and yet the sampler's log-probs are .* from"):
        await made.load(Weights.streamed(9, others.items(), weights.probe))
    with pytest.raises(ModelError, match="its completions cannot be trusted"):
        await rollout(made, greedy)
    await made.load(weights)
    assert (await rollout(made, greedy)).tokens == before.tokens


async def test_prompts_that_cannot_be_continued(small: str) -> None:
    cases: list[tuple[dict[str, Any], Sampling, str]] = [
        ({"prompt": ["abc>", ""]}, Sampling(), "the prompt '' has no token"),
        ({"prompt": ["abc>", 3]}, Sampling(), r"`prompt` of row 1 is 3 \(int\), not text"),
        ({"prompt": ["abc>"], "max_tokens": np.array([0])}, Sampling(), "`max_tokens` of row 0 is 0"),
        ({"question": ["abc>"]}, Sampling(), "prompt"),
    ]
    made = sampler(small, dtype="bfloat16")
    for columns, sampling, text in cases:
        with pytest.raises(DataError, match=text):
            await rollout(made, sampling, Batch.of(**columns))
    assert np.isfinite((await rollout(made, Sampling(max_tokens=8))).sampler_logprobs.values).all()
