"""Agents on a real sampler: what is recorded is what the policy computes for the same ids."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, Message, conversations, read_chat
from meshrl.errors import BackendError, ModelError
from meshrl.roles import OptimizerConfig, implementation
from meshrl.roles.generate_calls import GenerateCall
from meshrl.testing import ScriptedChat
from meshrl_torch.model.loading import new_config
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.sample.sampler import TorchSampler

TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else ' ' }}{% endfor %}"
SIZES = {"hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 48}
MODEL = rl.NewModel.model_validate({"characters": "abcdefgh> ", "chat_template": TEMPLATE, **SIZES})
AGENT = """
async def solve(client, row):
    messages, tokens = [], 0
    for word in ("abcdef", "gh"):
        messages.append({"role": "user", "content": word})
        told = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(told.choices[0].message)
        tokens += told.usage.completion_tokens
    return float(tokens)
"""


async def test_log_probs_are_those_of_the_policy_that_drew_before_an_abort_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_twice.py").write_text(AGENT, "utf-8")
    config, mine = rl.PolicyConfig(model=MODEL, optimizer=OptimizerConfig(lr=0.01)), rl.SamplerConfig(model=MODEL)
    sampler, policies = TorchSampler(mine), [implementation(rl.Policy, "torch")(config) for _ in range(2)]
    agent = Agent(AgentConfig(source=f"{tmp_path / 'asks_twice.py'}:solve"))
    agents = Agents(sampler, agent, Gateway(sampler, read_chat(mine)))
    sampling = rl.Sampling(n=4, max_tokens=16, ignore_eos=True, temperature=0.5)

    async def played() -> rl.Batch:
        return conversations(await rl.rollout(agents, rl.Batch.of(prompt=["?"], row=[{}]), sampling))

    await policies[1].update(await played(), rl.CrossEntropy())
    calls, midway = sampler.generate_calls, asyncio.Event()
    counted = calls.stepped

    def stepped(call: GenerateCall) -> None:
        counted(call)
        if call.steps == 4:
            midway.set()

    monkeypatch.setattr(calls, "stepped", stepped)
    playing = asyncio.create_task(played())
    await midway.wait()
    assert not playing.done(), playing.result()
    await agents.abort()
    await rl.publish(policies[1], agents)
    rows = await playing
    assert rows.rewards.tolist() == [32.0] * 4
    for version, policy in enumerate(policies):
        drawn = np.asarray(rows.versions.values == version)
        assert drawn.any()
        told = (await policy.logprobs(rows)).ragged("logprobs").values
        assert told[drawn] == pytest.approx(rows.sampler_logprobs.values[drawn], abs=1e-4)


def test_how_a_model_converses_is_read_by_its_backend(tmp_path: Path) -> None:
    silent = MODEL.model_copy(update={"chat_template": None})
    with pytest.raises(ModelError, match="has none"):
        read_chat(rl.SamplerConfig(model=silent))
    assert isinstance(read_chat(rl.SamplerConfig(model="none", backend="fake")), ScriptedChat)
    with pytest.raises(BackendError, match="does not say how its models converse"):
        read_chat(rl.SamplerConfig(model="none", backend="sim"))
    tokenizer = character_tokenizer(MODEL.characters, MODEL.max_tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    new_config(MODEL, tokenizer).save_pretrained(tmp_path)
    read = read_chat(rl.SamplerConfig(model=str(tmp_path)))
    assert (read.ends, read.max_tokens) == (frozenset({1}), 48)
    for each in (read, read_chat(rl.SamplerConfig(model=MODEL))):
        assert each.decode(each.encode(each.render([Message("user", "abc")], ()))) == "abc>"
