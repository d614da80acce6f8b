"""Agents on a real sampler: what is recorded is what the policy computes for the same ids."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from meshrl import (
    BackendError,
    Batch,
    CrossEntropy,
    ModelError,
    NewModel,
    OptimizerConfig,
    Policy,
    PolicyConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    publish,
    rollout,
)
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, Message, conversations, read_chat
from meshrl.roles import implementation
from meshrl.testing import ScriptedChat
from meshrl_hf.chat import HuggingFaceChat
from meshrl_hf.loading import new_config
from meshrl_hf.text import Words, character_tokenizer
from meshrl_torch.sampler import TorchSampler
from tests.agents.talks import client_of

MODEL = NewModel(characters="abcdefgh> ", hidden_size=16, ffn_size=32, layers=1, heads=2, max_tokens=48)
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else ' ' }}{% endfor %}"


def chat() -> HuggingFaceChat:
    tokenizer = character_tokenizer(MODEL.characters, MODEL.max_tokens)
    tokenizer.chat_template = TEMPLATE
    return HuggingFaceChat(Words(tokenizer, None, frozenset({1}), MODEL.max_tokens))


async def test_log_probs_are_the_policys_at_the_temperature() -> None:
    policy = implementation(Policy, "torch")(PolicyConfig(model=MODEL))
    gateway = Gateway(implementation(Sampler, "torch")(SamplerConfig(model=MODEL)), chat())

    async def agent(words: str) -> Any:
        session = gateway.open(Sampling(max_tokens=6, seed=len(words), temperature=0.5))
        async with client_of(gateway, session.url, session.token) as client:
            messages: list[Any] = []
            for word in words.split():
                messages.append({"role": "user", "content": word})
                told = await client.chat.completions.create(model="policy", messages=messages)
                messages.append(told.choices[0].message)
        return gateway.close(session)

    for rows in await asyncio.gather(agent("abc de f"), agent("gh"), agent("a b c")):
        assert len(rows) == 1
        told = await policy.logprobs(rows)
        learnt = np.asarray(rows.loss_mask.values, np.bool_)
        assert learnt.any()
        assert told.ragged("logprobs").values[learnt] == pytest.approx(rows.sampler_logprobs.values[learnt], abs=1e-4)


AGENT = """
async def solve(client, row):
    told = await client.completions.create(model="policy", prompt=row["prompt"])
    return float(told.usage.completion_tokens)
"""


class Watched(TorchSampler):
    """Tells when it begins to draw."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self.draws = asyncio.Event()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        self.draws.set()
        async for batch in super().generate(prompts, sampling):
            yield batch


async def test_an_answer_that_is_aborted_is_drawn_by_both_versions(tmp_path: Path) -> None:
    (tmp_path / "asks_once.py").write_text(AGENT, "utf-8")
    config = PolicyConfig(model=MODEL, optimizer=OptimizerConfig(lr=0.01))
    sampler, policies = Watched(SamplerConfig(model=MODEL)), [implementation(Policy, "torch")(config) for _ in range(2)]
    agents = Agents(sampler, Agent(AgentConfig(source=f"{tmp_path / 'asks_once.py'}:solve")), Gateway(sampler, chat()))
    sampling = Sampling(n=4, max_tokens=30, ignore_eos=True)

    async def played() -> Batch:
        return conversations(await rollout(agents, Batch.of(prompt=["abcdef"], row=[{}]), sampling))

    await policies[1].update(await played(), CrossEntropy())
    sampler.draws.clear()
    playing = asyncio.create_task(played())
    await sampler.draws.wait()
    for _ in range(12):  # each step of 30 lets the loop turn
        await asyncio.sleep(0)
    assert not playing.done(), playing.result()
    await agents.abort()
    await publish(policies[1], agents)
    rows = await playing
    assert rows.rewards.tolist() == [30.0] * 4
    for version, policy in enumerate(policies):
        drawn = np.asarray(rows.versions.values == version)
        assert drawn.sum() >= 4
        told = (await policy.logprobs(rows)).ragged("logprobs").values
        assert told[drawn] == pytest.approx(rows.sampler_logprobs.values[drawn], abs=1e-4)


async def test_a_conversation_that_has_no_room_left_says_so() -> None:
    gateway = Gateway(implementation(Sampler, "torch")(SamplerConfig(model=MODEL)), chat())
    session = gateway.open(Sampling(max_tokens=40, ignore_eos=True))
    async with client_of(gateway, session.url, session.token) as client:
        told = await client.completions.create(model="policy", prompt="abcdefgh" * 5)
        assert told.choices[0].finish_reason == "length"
        assert told.usage is not None
        assert told.usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="policy", prompt="abcdefgh" * 6)
        assert caught.value.code == "context_length_exceeded"


def test_how_a_model_converses_is_read_by_its_backend(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has none"):
        read_chat(SamplerConfig(model=MODEL))
    assert isinstance(read_chat(SamplerConfig(model="none", backend="fake")), ScriptedChat)
    with pytest.raises(BackendError, match="does not say how its models converse"):
        read_chat(SamplerConfig(model="none", backend="sim"))
    tokenizer = character_tokenizer(MODEL.characters, MODEL.max_tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    new_config(MODEL, tokenizer).save_pretrained(tmp_path)
    read = read_chat(SamplerConfig(model=str(tmp_path)))
    assert (read.ends, read.max_tokens) == (frozenset({1}), 48)
    new = read_chat(SamplerConfig(model=MODEL.model_copy(update={"chat_template": TEMPLATE})))
    for each in (read, new):
        assert each.decode(each.encode(each.render([Message("user", "abc")], ()))) == "abc>"
