"""What closes an assistant's turn in the chat template ends a completion, wherever one is learned, drawn or checked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshrl as rl
from meshrl.data import Batch
from meshrl.errors import DataError, ModelError
from meshrl.roles import OptimizerConfig, PolicyConfig, SamplerConfig, Sampling
from meshrl.run.check import doubts_of_ends
from meshrl_torch.model.loading import read_words
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.real_rows.tiny_tokenizers import CHATML, CLOSE, END, made, save

GEMMA = CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>\n", "<|im_end|> ")
SAYS_MORE = CHATML.replace("<|im_end|>", " [end].\n<|im_end|>")
OPENS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, CLOSE), (GEMMA, CLOSE), (OPENS, END), (SAYS_MORE, f" [end].\n{CLOSE}")]
)
async def test_a_model_stops_at_the_end_that_it_learned(template: str, end: str, tmp_path: Path) -> None:
    tokenizer = made(template=template)
    table: dict[str, Any] = {"model": save(tmp_path, tokenizer, tokenizer.eos_token_id), "chat": True}
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    policy = TorchPolicy(PolicyConfig(**table, optimizer=OptimizerConfig(lr=3e-2)))
    sampler = TorchSampler(SamplerConfig(**table))
    batch = await policy.encode(Batch.of(messages=[turns]))
    wanted = tokenizer(f"yes{end}", add_special_tokens=False)["input_ids"]
    assert np.asarray(batch.tokens[0])[np.asarray(batch.loss_mask[0], bool)].tolist() == wanted
    for _ in range(40):
        await policy.update(batch, rl.CrossEntropy())
    await sampler.load(await policy.weights())
    (row,) = [
        each async for each in sampler.generate(Batch.of(prompt=["hello"]), Sampling(temperature=0, max_tokens=16))
    ]
    assert np.asarray(row.tokens[0])[np.asarray(row.loss_mask[0], bool)].tolist() == wanted
    assert not row.row("truncated")[0]


@pytest.mark.parametrize("ends", [[1, 2], 0])
def test_ends_are_those_of_the_model_too(ends: Any, tmp_path: Path) -> None:
    tokenizer = made()
    known = read_words(SamplerConfig(model=save(tmp_path, tokenizer, ends)), tmp_path).ends
    assert known == {*np.atleast_1d(ends), *tokenizer.convert_tokens_to_ids([END, CLOSE])}


@pytest.mark.parametrize("keys", [{"stop_tokens": ["<|im_start|>"]}, {"stop": ["<|im_start|>"]}])
async def test_special_tokens_stop_a_completion(keys: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = made(template=None)
    sampler = TorchSampler(SamplerConfig(model=save(tmp_path, tokenizer)))
    prompts, stop = Batch.of(prompt=["hello"] * 40), tokenizer.convert_tokens_to_ids("<|im_start|>")
    sampling = Sampling.model_validate({"max_tokens": 60, "ignore_eos": True, **keys})
    rows = [each async for each in sampler.generate(prompts, sampling)]
    found = [
        (tokens.tolist(), cut) for each in rows for tokens, cut in zip(each.tokens, each.row("truncated"), strict=True)
    ]
    assert any(stop in tokens for tokens, _ in found)
    assert all((stop in tokens) == (not cut) and stop not in tokens[:-1] for tokens, cut in found)


def test_a_model_that_may_never_stop_is_found(tmp_path: Path) -> None:
    beyond = made(template=None)
    with pytest.raises(ModelError, match=r"no completion of .* could end: the model has 1 tokens, and the ends are"):
        doubts_of_ends(SamplerConfig(model=save(tmp_path / "beyond", beyond, vocabulary=1)), Sampling())
    tokenizer = made(template=CHATML.replace("<|im_end|>", "<|end|>"))
    config = SamplerConfig(model=save(tmp_path / "text", tokenizer), chat=True)
    (doubt,) = doubts_of_ends(config, Sampling())
    assert "the template ends an assistant's turn with '<|end|>'" in doubt
    assert doubts_of_ends(config, Sampling(stop=("<|end|>",))) == []
    assert doubts_of_ends(config, Sampling(ignore_eos=True, stop=("<|end|>",))) == []
    marked = config.model_copy(update={"model": save(tmp_path / "token", made())})
    opens, closes = ("<|im_start|>",), ("<|im_end|>",)
    for stops, is_well in (
        (Sampling(), True), (Sampling(ignore_eos=True, stop_tokens=closes), True), (Sampling(stop_tokens=opens), True),
        (Sampling(ignore_eos=True, stop=closes), True), (Sampling(ignore_eos=True, stop=("x",)), False),
        (Sampling(ignore_eos=True, stop_tokens=opens), False),
    ):  # fmt: skip
        assert bool(doubts_of_ends(marked, stops)) != is_well, stops
    assert "goes on to sampling.max_tokens = 16" in doubts_of_ends(config, Sampling(ignore_eos=True))[0]
    with pytest.raises(DataError, match=r"stop_tokens: .* has no token '<\|im_ends\|>'. did you mean '<\|im_end\|>'"):
        doubts_of_ends(config, Sampling(stop_tokens=("<|im_ends|>",)))
