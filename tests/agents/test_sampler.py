import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, Message, conversations, read_chat
from meshrl.errors import BackendError, DataError, ModelError
from meshrl.roles import Completion, OptimizerConfig, completed, implementation
from meshrl.roles.generate_calls import GenerateCall
from meshrl.run import Run, RunConfig
from meshrl.run.recorder import statistics
from meshrl.testing import FakePolicy, ScriptedChat, ScriptedSampler, delayed, simulate
from meshrl_torch.model.loading import new_config
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.sample.sampler import TorchSampler

AGENT = """
import asyncio

async def solve(client, row):
    ask = client.chat.completions.create
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(len(row["prompt"])):
        told = await ask(model="", messages=messages)
        messages += [told.choices[0].message, {"role": "user", "content": "again"}]
        await asyncio.sleep(len(told.choices[0].message.content))
    if row["prompt"] == "aa":
        await ask(model="", messages=[{"role": "user", "content": "sub-agent"}])
    if row["prompt"] == "b":
        raise ValueError("b")
    return len(row["prompt"]) * 0.5
"""


def written(file: Path, program: str) -> Agent:
    file.write_text(program, "utf-8")
    return Agent(AgentConfig(source=f"{file}:solve"))


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return written(tmp_path / "stream_agent.py", AGENT)


def fake_policy() -> FakePolicy:
    return FakePolicy(rl.PolicyConfig(model="none"))


def agents_of(agent: Agent, sampler: ScriptedSampler) -> Agents:
    return Agents(sampler, agent, Gateway(sampler, ScriptedChat()))


def test_a_row_is_an_episode_and_has_its_conversations(agent: Agent) -> None:
    async def main() -> rl.Batch:
        agents = agents_of(agent, ScriptedSampler(lambda prompt: "ok"))
        prompts = rl.Batch.of(prompt=["aa", "", "b"], groups=np.arange(3))
        return await rl.rollout(agents, prompts, rl.Sampling(n=2))

    batch = simulate(main)
    assert batch.objects("prompt") == ("aa", "aa", "", "", "b", "b")
    assert batch.rewards == pytest.approx([1, 1, 0, 0, np.nan, np.nan], nan_ok=True)
    assert [error is None for error in batch.objects("reward_error")] == [True] * 4 + [False] * 2
    assert batch.row("turns").tolist() == [3, 3, 0, 0, 1, 1]
    assert "tokens" not in batch
    assert batch.row("tries").tolist() == [1] * 6
    assert batch.row("conversation_count").tolist() == [2, 2, 0, 0, 1, 1]
    told = asyncio.run(statistics(batch))
    assert (told["conversations"], told["completion_tokens"], told["turns"]) == (1.0, 4.0, 4 / 3)
    assert told["tokens"] == sum(cast("rl.Ragged", each).lengths.sum() for each in batch.objects("episode"))
    assert [turns.tolist() for turns in batch.ragged("turn_rewards")][:4] == [[0, 0, 1]] * 2 + [[]] * 2
    by_turn = rl.Ragged.of([[1, 2, 3], [4, 5, 6], [], [], [7], [8]], np.float32)
    rows = conversations(batch.assign(advantages=np.arange(6, dtype=np.float32), by_turn=by_turn))
    assert rows.groups.tolist() == [0] * 4  # nothing is learned from the programs that failed
    assert rows.row("advantages").tolist() == [0, 0, 1, 1]
    of_tokens = [row.tolist() for row in rows.ragged("by_turn")]  # the sub-agent's turn is the third
    assert [[each for each in row if each] for row in of_tokens] == [
        [turn for turn in turns for _ in range(3)] for turns in ([1, 2], [3], [4, 5], [6])
    ]
    assert [[bool(each) for each in row] for row in of_tokens] == [mask.tolist() for mask in rows.loss_mask]
    assert rows.rewards.tolist() == [1.0] * 4
    assert [sum(mask) for mask in rows.loss_mask] == [6, 3, 6, 3]
    assert len(conversations(batch.select(np.zeros(0, np.int64)))) == 0
    failed = batch.select(np.array([4, 5]))
    with pytest.raises(DataError, match="none of the 2 rows"):
        asyncio.run(statistics(failed))  # a program that never worked
    assert asyncio.run(statistics(failed, worked=True))["reward_errors"] == 2.0


def test_episodes_are_trained_on_under_the_bound_and_a_sampler_that_fails_costs_retries(agent: Agent) -> None:
    random = Random(0)

    class Failing(ScriptedSampler):
        async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
            if 1 < asyncio.get_running_loop().time() < 100:
                raise RuntimeError("device-side assert")
            async for batch in super().generate(prompts, sampling):
                yield batch

    async def main(retries: int) -> list[tuple[int, float]]:
        kind = delayed(Failing, seed=1, generate=2.0, load=0.5)
        policy, agents = fake_policy(), agents_of(agent, kind(lambda prompt: "o" * random.randrange(1, 9)))
        await rl.publish(policy, agents)
        prompts = (rl.Batch.of(prompt=["a", "aa", "aaa"], groups=np.arange(3) + 3 * step) for step in range(5))
        trained: list[tuple[int, float]] = []
        async with rl.rollouts(agents, prompts, rl.Sampling(n=2, max_tokens=50), ahead=1, retries=retries) as stream:
            async for batch in stream:
                trained += zip(batch.groups.tolist(), batch.rewards.tolist(), strict=True)
                rows = conversations(batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups)))
                assert policy.version - min(rows.row("oldest_version").tolist()) <= 1
                await policy.update(rows, rl.CrossEntropy())
                await rl.publish(policy, stream)
        return trained

    with pytest.raises(RuntimeError, match="device-side"):
        simulate(lambda: main(0))
    expected = [(group, (0.5, 1.0, 1.5)[group % 3]) for group in range(15)]
    assert sorted(simulate(lambda: main(20))) == sorted(expected * 2)


RANDOM_AGENT = """
import asyncio, pathlib, random

async def solve(client, row):
    with pathlib.Path(__file__).with_name("played").open("a") as played:
        played.write(row["prompt"])
    for turn in range(random.randrange(4)):
        messages = [{"role": "user", "content": f"{row['prompt']} {random.random()}"}]
        await client.chat.completions.create(model="", messages=messages)
        await asyncio.sleep(random.uniform(0, 9))
    if random.random() < 0.2:
        raise ValueError("bad luck")
    return random.random()
"""


def test_a_replay_has_the_episodes_of_the_run_and_plays_none(tmp_path: Path) -> None:
    def trained(name: str, steps: int, replayed: str | None = None) -> list[rl.Batch]:
        async def main() -> list[rl.Batch]:
            policy, rows = fake_policy(), list[rl.Batch]()
            agents = agents_of(
                written(tmp_path / "random_agent.py", RANDOM_AGENT),
                delayed(ScriptedSampler, seed=len(name), generate=2.0, load=0.5)(lambda prompt: prompt[-4:]),
            )
            prompts = (rl.Batch.of(prompt=["a", "b"], groups=np.arange(2) + 2 * step) for step in range(steps))
            replay = str(tmp_path / replayed) if replayed else None
            config = RunConfig(name=name, folder=str(tmp_path), log=[], deterministic=True, replay=replay)
            async with Run(config) as run:
                await rl.publish(policy, agents)
                async with rl.rollouts(agents, prompts, rl.Sampling(n=2, max_tokens=50), ahead=2) as stream:
                    async for _ in run.steps(steps):
                        batch = await anext(stream)
                        rows.append(conversations(batch.assign(advantages=batch.rewards)))
                        await run.record(await policy.update(rows[-1], rl.CrossEntropy()), batch)
                        await rl.publish(policy, stream)
            return rows

        return simulate(main)

    first = trained("first", 4)
    played = tmp_path / "played"
    assert len(played.read_text("utf-8")) == 16
    again = trained("again", 5, "first")  # goes on where the record ends
    assert len(played.read_text("utf-8")) == 16 + 4
    assert len(again) == 5
    kept = ("prompt", "tokens", "loss_mask", "sampler_logprobs", "versions", "rewards", "staleness")
    assert [rows.only(*kept) for rows in again[:4]] == [rows.only(*kept) for rows in first]
    assert {rows.names for rows in again} == {rows.names for rows in first}


class Typist(ScriptedSampler):
    """Writes eight letters, one a second; a row that is aborted has those that it wrote."""

    loading, version = False, 0

    async def load(self, weights: rl.Weights) -> rl.Batch:
        self.loading = True
        await asyncio.sleep(2)
        places = await super().load(weights)
        self.loading, self.version = False, weights.version
        return places

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        assert not self.loading  # what was stopped waits for the new weights
        self.asked += ["".join(map(chr, row.tolist())) for row in prompts.tokens]
        given = [
            row.tolist()[: versions.tolist().count(-1)]
            for row, versions in zip(prompts.tokens, prompts.versions, strict=True)
        ]
        written = [[version for version in row.tolist() if version >= 0] for row in prompts.versions]
        async with self.generate_calls.begin(sampling.beside) as call:
            while short := [row for row in written if len(row) < 8]:
                await asyncio.sleep(1)
                if not await call.step():
                    break
                for row in short:
                    row.append(self.version)
        drawn = [
            Completion("abcdefgh"[: len(row)], tokens, b"abcdefgh"[: len(row)], [-0.5] * len(row), aborted=len(row) < 8)
            for tokens, row in zip(given, written, strict=True)
        ]
        versions = [[-1] * len(tokens) + row for tokens, row in zip(given, written, strict=True)]
        yield completed(prompts, drawn, 0, sampling).assign(versions=rl.Ragged.of(versions, np.int32))


TALKER = """
async def solve(client, row):
    said = []
    for turn in range(3):
        messages = [{"role": "user", "content": row["prompt"]}] + [
            {"role": role, "content": text} for text in said for role in ("assistant", "user")
        ]
        said.append((await client.chat.completions.create(model="", messages=messages)).choices[0].message.content)
    return float(said == ["abcdefgh"] * 3)
"""


def test_an_answer_that_is_aborted_goes_on_with_the_new_weights_and_the_program_sees_one(tmp_path: Path) -> None:
    async def main() -> list[list[int]]:
        policy, sampler, learnt = fake_policy(), Typist([]), list[list[int]]()
        agents = agents_of(written(tmp_path / "talker.py", TALKER), sampler)
        await rl.publish(policy, agents)
        prompts = (rl.Batch.of(prompt=["a"], groups=np.array([step])) for step in range(5))
        clock = asyncio.get_running_loop().time
        async with rl.rollouts(agents, prompts, rl.Sampling(n=2), ahead=2, swap="abort") as stream:
            async for batch in stream:
                assert batch.rewards.tolist() == [1.0, 1.0]
                rows = conversations(batch.assign(advantages=batch.rewards))
                assert len(rows) == 2  # each episode is one conversation, whose answers came back as they were told
                learnt += [[version for version in row.tolist() if version >= 0] for row in rows.versions]
                await policy.update(rows, rl.CrossEntropy())
                await asyncio.sleep(2.5)
                began = clock()
                await rl.publish(policy, stream)
                assert clock() - began <= 2.5  # no episode is waited for
        assert any(asked.endswith(": abcd") for asked in sampler.asked)  # it was aborted, and asked to go on
        return learnt

    versions = simulate(main)
    assert [len(row) for row in versions] == [24] * 10
    assert versions == [sorted(row) for row in versions]
    assert any(len(set(row[turn : turn + 8])) > 1 for row in versions for turn in (0, 8, 16))


class Refusing(Agents):
    async def load(self, weights: rl.Weights) -> rl.Batch:
        if weights.version == 1:
            raise DataError("refused")
        return await super().load(weights)


class Failing(Typist):
    async def abort(self) -> None:
        raise DataError("no abort")


def test_programs_wait_no_longer_where_new_weights_do_not_come(tmp_path: Path) -> None:
    async def main(sampler: Typist, told: str) -> None:
        policy = fake_policy()
        agents = Refusing(sampler, written(tmp_path / "talker.py", TALKER), Gateway(sampler, ScriptedChat()))
        await rl.publish(policy, agents)
        fresh = await policy.encode(rl.Batch.of(prompt=["a"], completion=["b"]))
        prompts = [rl.Batch.of(prompt=["a"], groups=np.array([0]))]
        async with rl.rollouts(agents, prompts, rl.Sampling(n=2), ahead=1, swap="abort") as stream:
            await asyncio.sleep(2.5)
            await policy.update(fresh, rl.CrossEntropy())
            with pytest.raises(DataError, match=told):
                await rl.publish(policy, stream)
            assert (await anext(stream)).rewards.tolist() == [1.0, 1.0]

    simulate(lambda: main(Typist([]), "refused"))
    simulate(lambda: main(Failing([]), "no abort"))


TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else ' ' }}{% endfor %}"
SIZES = {"hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 48}
MODEL = rl.NewModel.model_validate({"characters": "abcdefgh> ", "chat_template": TEMPLATE, **SIZES})
SOLVER = """
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
    (tmp_path / "asks_twice.py").write_text(SOLVER, "utf-8")
    config, mine = rl.PolicyConfig(model=MODEL, optimizer=OptimizerConfig(lr=0.01)), rl.SamplerConfig(model=MODEL)
    sampler, policies = TorchSampler(mine), [implementation(rl.Policy, "torch")(config) for _ in range(2)]
    agent = Agent(AgentConfig(source=f"{tmp_path / 'asks_twice.py'}:solve"))
    agents = Agents(sampler, agent, Gateway(sampler, read_chat(mine)))
    sampling = rl.Sampling(n=4, max_tokens=16, ignore_eos=True, temperature=0.5)

    async def played() -> rl.Batch:
        return conversations(await rl.rollout(agents, rl.Batch.of(prompt=["?"], row=[{}]), sampling))

    await policies[1].update(await played(), rl.CrossEntropy())
    midway, count = asyncio.Event(), GenerateCall.count

    def counted(call: GenerateCall) -> None:
        count(call)
        if call.steps == 4:
            midway.set()

    monkeypatch.setattr(GenerateCall, "count", counted)
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
