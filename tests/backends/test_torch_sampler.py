"""The torch sampler: what it draws, what it says of it, and that slots do not matter."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from meshrl import Batch, NewModel, PolicyConfig, Sampler, SamplerConfig, Sampling, Weights
from meshrl.errors import DataError, ModelError
from meshrl.weights import Bucket
from meshrl_hf.rollouts import Rollouts
from meshrl_hf.seeds import key
from meshrl_torch.cache import Cache
from meshrl_torch.decode import Decoder
from meshrl_torch.draw import Draw, uniforms
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=64)
PROMPTS = Batch.of(prompt=["abc>", "h>", "abcdefgh>", "bad>", "c"], groups=np.arange(10, 15))


def policy(**changes: object) -> TorchPolicy:
    made = TorchPolicy(PolicyConfig.model_validate({"model": MODEL, **changes}))
    with torch.no_grad():  # far from the initialisation, where all tokens are about equally probable
        for parameter in made._model.network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return made


async def sampler(slots: int = 512, **changes: object) -> TorchSampler:
    made = TorchSampler(SamplerConfig.model_validate({"model": MODEL, "slots": slots, **changes}))
    await made.load((await policy(**changes).weights()).with_version(7))
    return made


def floats(array: np.ndarray[Any, Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def bools(array: np.ndarray[Any, Any]) -> NDArray[np.bool_]:
    return np.asarray(array, np.bool_)


async def parts(made: Sampler, prompts: Batch, sampling: Sampling) -> list[Batch]:
    return [part async for part in made.generate(prompts, sampling)]


async def rollout(made: Sampler, prompts: Batch, sampling: Sampling) -> Batch:
    """All rows in the order of the prompts."""
    whole = await parts(made, prompts.part(np.arange(len(prompts))), sampling)
    return Batch.join(whole)


async def test_columns() -> None:
    batch = await rollout(await sampler(), PROMPTS, Sampling(n=3, max_tokens=12))
    assert len(batch) == 15
    assert batch.groups.tolist() == np.repeat(np.arange(10, 15), 3).tolist()
    for row, prompt in enumerate(batch.objects("prompt")):
        text, tokens, new = str(prompt), batch.tokens[row], bools(batch.loss_mask[row])
        assert (~new[: len(text)]).all()
        assert new[len(text) :].all()
        assert ((batch.sampler_logprobs[row] != 0) == new).all()
        assert (batch.versions[row] == np.where(new, 7, -1)).all()
        ended = tokens[-1] == 1
        assert batch.row("truncated")[row] == (not ended)
        assert ended or new.sum() == 12
        characters = "".join(MODEL.characters[token - 2] for token in tokens[len(text) :] if token > 1)
        assert batch.objects("completion")[row] == characters
    assert batch.row("temperature").tolist() == [1.0] * 15
    assert 0 < batch.row("truncated").sum() < 15


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_agree_with_the_trainer(temperature: float) -> None:
    batch = await rollout(await sampler(slots=4), PROMPTS, Sampling(n=5, max_tokens=30, temperature=temperature))
    scored = (await policy().logprobs(batch)).ragged("logprobs").values
    mask = bools(batch.loss_mask.values)
    np.testing.assert_allclose(floats(batch.sampler_logprobs.values)[mask], floats(scored)[mask], atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
async def test_greedy_equals_transformers(kind: str, tmp_path: Path) -> None:
    trainer = policy()
    await trainer.save(str(tmp_path / "model"))
    torch.manual_seed(0)
    if kind == "mistral":  # grouped queries and a window
        wide: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
        mistral = MistralConfig(vocab_size=11, **wide, **heads, eos_token_id=1, initializer_range=0.3)
        MistralForCausalLM(mistral).save_pretrained(tmp_path / "model")
    if kind == "gpt2":  # learned positions, dropout in its configuration
        shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        gpt2 = GPT2Config(vocab_size=11, **shape, eos_token_id=1, bos_token_id=None, initializer_range=0.3)
        GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "model")
    made = TorchSampler(SamplerConfig(model=str(tmp_path / "model"), slots=3))
    batch = await rollout(made, PROMPTS, Sampling(max_tokens=20, temperature=0))
    network: Any = made._model.network
    network.set_attn_implementation("eager")
    for row, tokens in enumerate(batch.tokens):
        prompt = torch.from_numpy(tokens[~bools(batch.loss_mask[row])].astype(np.int64))[None]
        expected = network.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert tokens.tolist() == expected[0].tolist()
    assert batch.row("temperature").tolist() == [1.0] * 5


async def test_draws_do_not_depend_on_slots() -> None:
    whole = [await rollout(await sampler(slots=slots), PROMPTS, Sampling(n=6, max_tokens=16)) for slots in (512, 7, 1)]
    for other in whole[1:]:
        assert other.tokens == whole[0].tokens
        assert other.objects("completion") == whole[0].objects("completion")
        np.testing.assert_allclose(
            floats(other.sampler_logprobs.values), floats(whole[0].sampler_logprobs.values), atol=1e-5
        )


async def test_draws_do_not_depend_on_how_a_mesh_divides_the_rows() -> None:
    sampling = Sampling(n=3, max_tokens=16)
    whole = await rollout(await sampler(), PROMPTS, sampling)
    divided = [part for half in PROMPTS.split(2) for part in await parts(await sampler(), half, sampling)]
    assert Batch.join(divided).tokens == whole.tokens


@pytest.mark.bits
async def test_seeds() -> None:
    sampling = Sampling(n=4, max_tokens=16)
    first, again = [await rollout(await sampler(), PROMPTS, sampling) for _ in range(2)]
    assert first == again
    made = await sampler()
    calls = [await rollout(made, PROMPTS, sampling) for _ in range(2)]
    assert calls[0] == first
    assert calls[1].tokens != first.tokens
    other = await rollout(await sampler(), PROMPTS, sampling.model_copy(update={"seed": 1}))
    assert other.tokens != first.tokens


async def test_rows_come_as_they_finish_and_go_back_in_order() -> None:
    limits = np.array([40, 1, 20, 3, 30, 2, 8, 12, 1, 25])
    prompts = Batch.concat([PROMPTS, PROMPTS]).assign(max_tokens=limits)
    whole = await parts(await sampler(slots=3), prompts.part(np.arange(10)), Sampling(ignore_eos=True))
    assert len(whole) > 2
    arrived = [text for part in whole for text in part.objects("prompt")]
    assert arrived != list(prompts.objects("prompt"))
    batch = Batch.join(whole)
    assert batch.objects("prompt") == prompts.objects("prompt")
    assert [int(mask.sum()) for mask in batch.loss_mask] == limits.tolist()


async def test_no_prompts() -> None:
    made = await parts(await sampler(), PROMPTS.select([]), Sampling(n=2))
    assert [len(part) for part in made] == [0]
    full = await parts(await sampler(), PROMPTS, Sampling(n=2))
    assert set(made[0].names) == set(full[0].names)


async def test_stop_texts_end_a_completion() -> None:
    free = await rollout(await sampler(), PROMPTS, Sampling(n=8, max_tokens=30))
    held = await rollout(await sampler(), PROMPTS, Sampling(n=8, max_tokens=30, stop=("g", "ab")))
    stopped = 0
    for row, text in enumerate(map(str, free.objects("completion"))):
        places = [place for place in (text.find("g"), text.find("ab")) if place >= 0]
        assert held.objects("completion")[row] == (text[: min(places)] if places else text)
        stopped += bool(places)
        if places:
            assert not held.row("truncated")[row]
            assert held.tokens[row].tolist() == free.tokens[row][: len(held.tokens[row])].tolist()
    assert stopped > 5


async def test_top_k_and_top_p_restrict_the_draw_and_not_the_logprob() -> None:
    batch = await rollout(await sampler(), PROMPTS, Sampling(n=20, max_tokens=8, top_k=1))
    greedy = await rollout(await sampler(), PROMPTS, Sampling(n=20, max_tokens=8, temperature=0))
    assert batch.tokens == greedy.tokens
    np.testing.assert_allclose(floats(batch.sampler_logprobs.values), floats(greedy.sampler_logprobs.values), atol=1e-6)
    assert (await rollout(await sampler(), PROMPTS, Sampling(n=20, max_tokens=8, top_p=1e-6))).tokens == greedy.tokens


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


def test_uniform_numbers() -> None:
    rows, places = np.divmod(np.arange(100_000), 100)
    numbers = uniforms(key(1, 2, 3), rows, places)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] / 5000 - 1).max() < 0.06
    table = numbers.reshape(1000, 100)
    assert np.abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.01
    assert np.abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.01
    assert key(1, 2) != key(2, 1)


async def test_new_weights_reach_rows_in_flight() -> None:
    made = await sampler(slots=2)
    stream = made.generate(PROMPTS, Sampling(n=2, max_tokens=24, ignore_eos=True))
    first = await anext(stream)
    await made.load((await policy(seed=5).weights()).with_version(8))
    batch = Batch.concat([first, *[part async for part in stream]])
    kinds = [sorted(set(versions.tolist())) for versions in batch.versions]
    assert [-1, 7] in kinds
    assert [-1, 8] in kinds
    assert [-1, 7, 8] in kinds


async def test_a_stream_that_is_closed_gives_its_cache_back() -> None:
    made = await sampler()
    stream = made.generate(PROMPTS, Sampling(max_tokens=30, ignore_eos=True, n=4))
    assert isinstance(stream, AsyncGenerator)
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stream.aclose()
    assert len(made._caches) == 1


async def test_the_cache_is_kept_and_is_no_larger_than_a_call_needs() -> None:
    made = await sampler()
    await rollout(made, PROMPTS, Sampling(n=8, max_tokens=4, ignore_eos=True))
    (cache,) = made._caches
    kept = cache.layers[0][0]
    assert kept.shape == (40, 2, 32, 8)
    await rollout(made, PROMPTS, Sampling(n=4, max_tokens=4, ignore_eos=True))
    assert cache.layers[0][0] is kept
    await rollout(made, PROMPTS, Sampling(max_tokens=50, ignore_eos=True))
    assert cache.layers[0][0].shape == (5, 2, 64, 8)


async def test_streams_at_once_do_not_mix() -> None:
    sampling = Sampling(n=4, max_tokens=24)
    made = await sampler()
    alone = [await rollout(made, PROMPTS, sampling) for _ in range(2)]
    made = await sampler()
    together = await asyncio.gather(rollout(made, PROMPTS, sampling), rollout(made, PROMPTS, sampling))
    assert [each.tokens for each in together] == [each.tokens for each in alone]


async def test_weights_round_trip() -> None:
    trainer, made = policy(seed=2), await sampler()
    weights = await trainer.weights()
    assert "lm_head.weight" not in weights.tensors  # tied to the embeddings: sent once
    await made.load(weights)
    greedy = await rollout(made, PROMPTS, Sampling(max_tokens=8, temperature=0))
    scored = (await trainer.logprobs(greedy)).ragged("logprobs").values
    mask = bools(greedy.loss_mask.values)
    np.testing.assert_allclose(floats(greedy.sampler_logprobs.values)[mask], floats(scored)[mask], atol=1e-4)


async def test_weights_of_another_model() -> None:
    made, weights = await sampler(), await policy().weights()
    name, array = next(iter(weights.tensors.items()))
    for tensors, text in (
        ({**weights.tensors, "other": array.copy()}, r"1 tensors unknown here \(other\)"),
        ({other: kept for other, kept in weights.tensors.items() if other != name}, "1 tensors missing"),
        ({**weights.tensors, name: array[:1].copy()}, r"float32\[1, 16\] and the model has float32\[11, 16\]"),
        ({**weights.tensors, name: array.astype(np.float64)}, "is float64"),
    ):
        with pytest.raises(ModelError, match=text):
            await made.load(Weights(9, tensors))
    assert (await rollout(made, PROMPTS, Sampling())).versions.values.max() == 7


async def test_weights_that_did_not_arrive() -> None:
    made, weights = await sampler(), await policy().weights()
    assert (await made.load(weights)).row("difference").max() < 1e-5
    (bucket,) = weights.buckets
    name = next(iter(bucket.index))
    memory = bucket.memory.copy()
    memory[bucket.index[name].start :][:64] = 1
    damaged = Weights.of(8, [Bucket(bucket.index, bucket.nbytes, memory)])
    before = await rollout(made, PROMPTS, Sampling(temperature=0))
    with pytest.raises(ModelError, match=rf"version 8 did not arrive as they were sent: 1 tensors differ \({name}\)"):
        await made.load(damaged)
    assert (await rollout(made, PROMPTS, Sampling(temperature=0))).tokens == before.tokens, "the old ones stay"
    others = {name: np.multiply(array, 1.5, dtype=np.float32) for name, array in weights.tensors.items()}
    with pytest.raises(ModelError, match=r"version 9 arrived, and yet the sampler's log-probs are .* from"):
        await made.load(Weights.streamed(9, others.items(), weights.probe))
    with pytest.raises(ModelError, match="its completions cannot be trusted"):
        await rollout(made, PROMPTS, Sampling())
    await made.load(weights)
    assert (await rollout(made, PROMPTS, Sampling(temperature=0))).tokens == before.tokens


async def test_bfloat16_samples() -> None:
    made = await sampler(dtype="bfloat16")
    batch = await rollout(made, PROMPTS, Sampling(max_tokens=8))
    assert np.isfinite(batch.sampler_logprobs.values).all()


@pytest.mark.parametrize(
    ("columns", "sampling", "text"),
    [
        ({"prompt": ["abc>", ""]}, Sampling(), "the prompt '' has no token"),
        ({"prompt": ["abc>", 3]}, Sampling(), r"`prompt` of row 1 is 3 \(int\), not text"),
        ({"prompt": ["aXb>"]}, Sampling(), "'aXb>' has 'X', which the tokenizer does not know"),
        ({"prompt": ["abc>"]}, Sampling(max_tokens=61), r"row 0 with 61 new tokens \(max_tokens\) has 65 tokens"),
        ({"prompt": ["abc>"], "max_tokens": np.array([0])}, Sampling(), "`max_tokens` of row 0 is 0"),
        ({"question": ["abc>"]}, Sampling(), "prompt"),
    ],
)
async def test_prompts_that_cannot_be_continued(
    columns: dict[str, list[object]], sampling: Sampling, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        await rollout(await sampler(), Batch.of(**columns), sampling)


def test_slots_are_refilled_before_the_longest_row_ends() -> None:
    made = TorchSampler(SamplerConfig(model=MODEL, slots=4))
    limits = np.array([40, *[4] * 27])
    batch = Batch.of(prompt=["abc>"] * 28, max_tokens=limits)
    steps: dict[int, int] = {}
    for refill in (1, 4):
        request = Rollouts(made._model, batch, Sampling(ignore_eos=True)).request
        decoder = Decoder(made._model, Cache(), request, Draw(Sampling(), key(0)), 4, refill)
        steps[refill] = 0
        while decoder.busy:
            decoder.step(0)
            steps[refill] += 1
    assert steps[1] < steps[4]
