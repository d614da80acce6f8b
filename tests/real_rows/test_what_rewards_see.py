"""Rewards, stop texts, environments and agents get what the model said: special tokens and whole thoughts."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshrl as rl
from meshrl.agents import Gateway, Message
from meshrl.agents.chat import message_of
from meshrl.agents.conversation import Conversation
from meshrl.data import Batch
from meshrl.observe import read_run
from meshrl.observe.page import make_content
from meshrl.roles import PolicyConfig, SamplerConfig, Sampling
from meshrl_http.dialects import Piece
from meshrl_http.row import Decoded
from meshrl_inference.engine_side.protocol import Generate, Row
from meshrl_torch.model.chat import read_chat
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.agents.talks import opened
from tests.real_rows.shapes import SHAPES, Shape, turns

NAMED = {shape.name: shape for shape in SHAPES}
CALLS = Shape(
    "calls", "bytes", NAMED["ChatML"].template, "<|im_end|>", more=("<|im_start|>", "<tool_call>", "</tool_call>")
)
EMPTY = "<think>\n\n</think>\n\n%<|im_end|>"
HEADED = [Shape(f"A turn after {each}", "bytes", turns("<user>%", f"{each}\n", EMPTY), "<|im_end|>")
          for each in ("<assistant>", "[|assistant|]")]  # fmt: skip
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=user<|channel|>final<|message|>42"
GREEDY = Sampling(max_tokens=60, temperature=0)


def speaker(folder: Path, shape: Shape, before: str, said: str) -> dict[str, Any]:
    """The table of a model that says this after that, because each token has its successor."""
    tokenizer = replace(shape, more=(*shape.more, *(shape.think or ()))).tokenizer()
    line = tokenizer(before + said + shape.eos, add_special_tokens=False)["input_ids"]
    size = -len(tokenizer) % 4 + len(tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=size, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=400, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        model.lm_head.weight.zero_()
        for one, other in pairwise(line):
            model.lm_head.weight[other, one] = 9
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model": str(folder), "chat": True, "chat_template_kwargs": dict(shape.variables)}


async def drawn(
    table: dict[str, Any], sampling: Sampling = GREEDY, prompt: str = "hello", rows: Batch | None = None
) -> Batch:
    sampler, asked = TorchSampler(SamplerConfig(**table)), Batch.of(prompt=[prompt]) if rows is None else rows
    (found,) = [each async for each in sampler.generate(asked, sampling)]
    return found


def text_of(rows: Batch) -> str:
    return str(rows.objects("completion")[0])


SAYS = [
    (CALLS, "\n", "<tool_call>{yes}</tool_call>"),
    (NAMED["Mistral, Tekken"], "[/INST]", "[THINK]hm[/THINK]yes"),
    (NAMED["Qwen3"], "\n", "<think>hm</think>yes"),
    (NAMED["Llama 3"], "\n\n", "<|start_header_id|>yes"),
    (NAMED["Qwen3, thinking"], "\n", "hm</think>yes"),
    (NAMED["QwQ"], "\n", "hm</think>yes"),
    (NAMED["Thoughts kept"], "\n", "hm</think>yes"),
    (NAMED["DeepSeek-R1"], "\n", "hm</think>yes"),
    (NAMED["DeepSeek-V3.1, thinking"], "<think>", "hm</think>yes"),
    (NAMED["DeepSeek-V3.1"], "</think>", "yes"),
    (NAMED["EXAONE Deep"], "\n", "hm</thought>yes"),
    (NAMED["Qwen3, no thoughts"], "\n\n", "yes"),
    (NAMED["Baichuan"], "<reserved_107>", "yes"),
    (NAMED["Command A"], "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>yes<|END_RESPONSE|>"),
    *((shape, "\n", "yes") for shape in HEADED),
]


@pytest.mark.parametrize(("shape", "before", "said"), SAYS, ids=[shape.name for shape, _, _ in SAYS])
async def test_a_completion_is_what_was_said(shape: Shape, before: str, said: str, tmp_path: Path) -> None:
    table = speaker(tmp_path, shape, before, said)
    rows = await drawn(table)
    assert text_of(rows) == shape.opened + said
    assert not rows.row("truncated")[0]
    again = await TorchPolicy(PolicyConfig(**table)).encode(Batch.of(prompt=["hello"], completion=[text_of(rows)]))
    if shape.opened and "Qwen3" not in shape.name:  # whose template puts line ends around thoughts
        assert again.tokens[0].tolist() == rows.tokens[0].tolist(), "a history that is put back is as it was drawn"
    if shape.opened:
        assert text_of(await drawn(table, prompt=f"hello{shape.opened}")) == shape.opened + said, "a user's tag"
    for prompt in (None, [{"role": "user", "content": shape.opened}]):  # what is no prompt here is not read
        again = await drawn({**table, "chat": False}, rows=rows.assign(prompt=[prompt]))
        assert text_of(again) == shape.opened + said
    tokenizer = replace(shape, more=(*shape.more, *(shape.think or ()))).tokenizer()
    by_hand = tokenizer.decode(rows.tokens[0][~np.asarray(rows.loss_mask[0], bool)])
    assert text_of(await drawn({**table, "chat": False}, prompt=by_hand)) == said, "the prompt itself has the tag"


STOPS = [
    "analysis<|message|>h", "<|start|>assistant to", "<|end|><|start|>assistant", "final<|message|>4",
    "<|return|><|start|>u", "2<|return|>",
]  # fmt: skip


@pytest.mark.parametrize("stop", STOPS)
def test_stop_texts_may_have_special_tokens(stop: str) -> None:
    shape = NAMED["gpt-oss"]
    tokenizer = shape.tokenizer()
    harmony = tokenizer(f"{HARMONY}<|return|><|start|>user", add_special_tokens=False)["input_ids"]
    known = shape.words(tokenizer)
    order = Generate([], 0.0, 1.0, 0, [], [stop])
    row = Decoded(Row(0, np.array([5], np.int32).tobytes(), 99, 0), order)
    row.take(Piece(harmony, [0.0] * len(harmony), "length", None), 0, known)
    text = tokenizer.decode(row.tokens)
    assert row.reason == "stop"
    assert stop in text
    assert stop not in tokenizer.decode(row.tokens[:-1])


@pytest.mark.parametrize(
    "stop", ["m<tool_call>y", "m<tool_call>yes<|im_end|><|im_start|>", "m<tool_call>yes<|im_end|>"]
)
async def test_a_stop_text_cuts_before_special_tokens(stop: str, tmp_path: Path) -> None:
    table = speaker(tmp_path, CALLS, "\n", "hm<tool_call>yes<|im_end|><|im_start|>")
    sampling = GREEDY.model_copy(update={"stop": (stop,), "ignore_eos": True})
    rows = await drawn(table, sampling)
    assert text_of(rows) == "h"
    assert not rows.row("truncated")[0]
    (again,) = [each async for each in TorchSampler(SamplerConfig(**table)).generate(rows, sampling)]
    assert again.tokens[0].tolist() == rows.tokens[0].tolist(), "a row that has stopped stays as it is"


async def test_an_environment_sees_each_thought_whole(tmp_path: Path) -> None:
    shape = NAMED["QwQ"]
    table = speaker(tmp_path / "model", shape, "\n", "hm</think>yes")
    games = tmp_path / "games.py"
    games.write_text(
        "class Game:\n    def reset(self, row):\n        self.seen = []\n        return row['prompt']\n"
        "    def step(self, said):\n        self.seen.append(said)\n"
        "        done = len(self.seen) == 2\n"
        "        return 'more', float(self.seen == ['<think>\\nhm</think>yes'] * len(self.seen)), done\n"
    )
    template = "\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    config = rl.EnvironmentConfig(source=f"{games}:Game", template=template)
    async with rl.Run(rl.RunConfig(folder=str(tmp_path))) as run:
        sampler = await run.spawn(rl.Sampler, SamplerConfig(**table))
        episodes = rl.Episodes(sampler, await run.spawn(rl.Environment, config), config)
        rows = await rl.rollout(episodes, Batch.of(prompt=["hello"], groups=np.arange(1)), GREEDY)
    assert rows.rewards.tolist() == [2.0]
    assert text_of(rows).split("more") == [
        "<think>\nhm</think>yes\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think>yes",
    ]


@pytest.mark.parametrize("name", ["Thoughts kept", "QwQ", "DeepSeek-R1"])
async def test_an_agent_gets_the_thought_once(name: str, tmp_path: Path) -> None:
    shape = NAMED[name]
    table = speaker(tmp_path, shape, "\n", "hm</think>yes")
    chat, sampler = read_chat(SamplerConfig(**table)), TorchSampler(SamplerConfig(**table, seed=1))
    gateway = Gateway(sampler, chat)
    hello = Message("user", "hello")
    async with opened(gateway, GREEDY) as talk:
        told = (await talk.ask()).choices[0].message
        assert told.content == f"{shape.opened}hm</think>yes"
        assert (await talk.complete(chat.render([hello], ()))).choices[0].text == "hm</think>yes"
    put_back = chat.render([hello, Message("assistant", told.content), Message("user", "more")], ())
    assert put_back.count("<think>") == put_back.count("</think>") + 1 <= 2
    await gateway.aclose()


@pytest.mark.parametrize("name", ["Llama 3", "Zephyr", "ChatML, an end put behind"])
async def test_a_prompt_without_messages_begins_as_the_tokenizer_begins_texts(name: str, tmp_path: Path) -> None:
    shape = NAMED[name]
    table: dict[str, Any] = {**speaker(tmp_path, shape, "\n", "yes"), "chat": False}
    tokenizer, conversation = shape.tokenizer(), Conversation(read_chat(SamplerConfig(**table)))
    begins = [shape.bos] if shape.bos else []
    for text in ("hello\n", f"{shape.bos or ''}hello\n"):
        tokens = conversation.ask_text(text).tokens.tolist()
        assert tokenizer.convert_ids_to_tokens(tokens)[: len(begins)] == begins
        assert tokens == (await drawn(table, prompt=text)).tokens[0].tolist()[: len(tokens)]
        assert tokens == tokenizer("hello\n")["input_ids"][: len(tokens)]


def test_a_template_that_refuses_channels_in_answers_gets_them_without(tmp_path: Path) -> None:
    chat = read_chat(SamplerConfig(**speaker(tmp_path, NAMED["gpt-oss"], "assistant", "yes")))
    messages = [Message("user", "hello"), Message("assistant", HARMONY), Message("user", "more")]
    text = NAMED["gpt-oss"].tokenizer().decode(Conversation(chat).ask(messages).tokens)
    assert "<|channel|>final<|message|>analysishmassistant to=userfinal42<|end|>" in text


def test_a_call_behind_a_special_token_is_a_call() -> None:
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    (call,) = message_of('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', tools, lambda: "1").tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')


async def test_samples_have_special_tokens_and_pages_have_none(tmp_path: Path) -> None:
    async with rl.Run(rl.RunConfig(folder=str(tmp_path), name="seen")) as run:
        async for _ in run.steps(1):
            batch = Batch.of(prompt=["hello"], completion=[f"{HARMONY}<think>"], rewards=np.ones(1, np.float32))
            await run.record(rl.Metrics({"loss": (1.0, 1.0)}), batch)
    line = msgspec.json.decode((run.folder / "samples.jsonl").read_bytes(), type=dict[str, Any])
    assert line["completion"] == f"{HARMONY}<think>"
    (sample,) = make_content(read_run(run.folder)).samples
    assert sample["completion"] == "analysishmassistant to=userfinal42<think>"
