"""Agents as a sampler: episodes in a stream, trained on under the bound."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from meshrl import (
    Batch,
    CrossEntropy,
    PolicyConfig,
    Ragged,
    Sampling,
    Weights,
    group_advantages,
    publish,
    rollout,
    rollouts,
)
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, conversations
from meshrl.errors import DataError
from meshrl.run import Run, RunConfig
from meshrl.run.batch_stats import statistics
from meshrl.testing import FakePolicy, ScriptedChat, ScriptedSampler, Witness, delayed, simulate

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


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    (tmp_path / "stream_agent.py").write_text(AGENT, "utf-8")
    return Agent(AgentConfig(source=f"{tmp_path / 'stream_agent.py'}:solve"))


def agents_of(agent: Agent, sampler: ScriptedSampler) -> Agents:
    return Agents(sampler, agent, Gateway(sampler, ScriptedChat()))


def test_a_row_is_an_episode_and_has_its_conversations(agent: Agent) -> None:
    async def main() -> Batch:
        agents = agents_of(agent, ScriptedSampler(lambda prompt: "ok"))
        prompts = Batch.of(prompt=["aa", "", "b"], groups=np.arange(3))
        return await rollout(agents, prompts, Sampling(n=2))

    batch = simulate(main)
    assert batch.objects("prompt") == ("aa", "aa", "", "", "b", "b")
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [error is not None for error in batch.objects("reward_error")] == [False] * 4 + [True] * 2
    assert batch.row("turns").tolist() == [3, 3, 0, 0, 1, 1]
    assert "tokens" not in batch
    assert batch.row("tries").tolist() == [1] * 6
    assert batch.row("conversation_count").tolist() == [2, 2, 0, 0, 1, 1]
    told = asyncio.run(statistics(batch))
    assert (told["conversations"], told["completion_tokens"], told["turns"]) == (1.0, 4.0, 4 / 3)
    assert told["tokens"] == sum(len(row) for row in conversations(batch).tokens)
    rows = conversations(batch.assign(advantages=np.arange(6, dtype=np.float32)))
    assert rows.groups.tolist() == [0, 0, 0, 0, 2, 2]
    assert rows.row("advantages").tolist() == [0, 0, 1, 1, 4, 5]
    assert rows.rewards.tolist() == [1.0] * 4 + [0.0] * 2
    assert [sum(mask) for mask in rows.loss_mask] == [6, 3, 6, 3, 3, 3]
    assert len(conversations(batch.select(np.zeros(0, np.int64)))) == 0
    failed = batch.select(np.array([4, 5]))
    with pytest.raises(DataError, match="the reward raised on each of the 2 rows"):
        asyncio.run(statistics(failed))  # a program that never worked
    assert asyncio.run(statistics(failed, worked=True))["reward_errors"] == 2.0


def test_each_turns_tokens_have_what_is_the_turns(agent: Agent) -> None:
    async def main() -> Batch:
        return await rollout(
            agents_of(agent, ScriptedSampler(lambda prompt: "ok")), Batch.of(prompt=["aa", "a"]), Sampling()
        )

    batch = simulate(main)
    assert [turns.tolist() for turns in batch.ragged("turn_rewards")] == [[0, 0, 1], [0.5]]
    rows = conversations(batch.assign(advantages=Ragged.of([[1, 2, 3], [4]], np.float32)))
    learnt = [row[row != 0].tolist() for row in rows.ragged("advantages")]
    assert learnt == [[1, 1, 1, 2, 2, 2], [3, 3, 3], [4, 4, 4]]  # the sub-agent's turn is the third
    told = rows.ragged("advantages").values != 0
    assert (told == rows.loss_mask.values).all()


def test_the_age_of_an_episode_is_that_of_its_tokens(agent: Agent) -> None:
    """Also where the weights went to the sampler itself; without tokens, the last that `Agents` were given."""

    async def main() -> Batch:
        sampler, policy = ScriptedSampler(lambda prompt: "ok"), FakePolicy(PolicyConfig(model="none"))
        agents = agents_of(agent, sampler)
        await publish(policy, agents)
        await policy.update(conversations(await rollout(agents, Batch.of(prompt=["a"]), Sampling())), CrossEntropy())
        await publish(policy, sampler)
        return await rollout(agents, Batch.of(prompt=["a", ""]), Sampling())

    assert simulate(main).row("oldest_version").tolist() == [1, 0]


def test_a_sampler_that_fails_for_a_while_costs_retries_and_no_reward(agent: Agent) -> None:
    class Failing(ScriptedSampler):
        async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
            if 1 < asyncio.get_running_loop().time() < 100:
                raise RuntimeError("device-side assert")
            async for batch in super().generate(prompts, sampling):
                yield batch

    async def main(retries: int) -> list[float]:
        agents = agents_of(agent, Failing(lambda prompt: "ok"))
        prompts = (Batch.of(prompt=["a", "aaa"], groups=np.arange(2) + 2 * step) for step in range(3))
        await publish(FakePolicy(PolicyConfig(model="none")), agents)
        async with rollouts(agents, prompts, Sampling(n=2), ahead=3, retries=retries) as stream:
            return [reward async for batch in stream for reward in batch.rewards.tolist()]

    with pytest.raises(RuntimeError, match="device-side"):
        simulate(lambda: main(0))
    assert sorted(simulate(lambda: main(20))) == [0.5] * 6 + [1.5] * 6


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
    (tmp_path / "random_agent.py").write_text(RANDOM_AGENT, "utf-8")

    def trained(name: str, steps: int, replayed: str | None = None) -> list[Batch]:
        """The rows of each step, by a run of this name."""
        replay = str(tmp_path / replayed) if replayed else None

        async def main() -> list[Batch]:
            policy, rows = FakePolicy(PolicyConfig(model="none")), list[Batch]()
            agents = agents_of(
                Agent(AgentConfig(source=f"{tmp_path / 'random_agent.py'}:solve")),
                delayed(ScriptedSampler, seed=len(name), generate=2.0, load=0.5)(lambda prompt: prompt[-4:]),
            )
            prompts = (Batch.of(prompt=["a", "b"], groups=np.arange(2) + 2 * step) for step in range(steps))
            config = RunConfig(name=name, folder=str(tmp_path), log=[], deterministic=True, replay=replay)
            async with Run(config) as run:
                await publish(policy, agents)
                async with rollouts(agents, prompts, Sampling(n=2, max_tokens=50), ahead=2) as stream:
                    async for _ in run.steps(steps):
                        batch = await anext(stream)
                        rows.append(conversations(batch.assign(advantages=batch.rewards)))
                        await run.record(await policy.update(rows[-1], CrossEntropy()), batch)
                        await publish(policy, stream)
            return rows

        return simulate(main)

    first = trained("first", 6)
    played = (tmp_path / "played").read_text("utf-8")
    assert len(played) == 24
    again = trained("again", 6, "first")
    third = trained("third", 7, "again")  # goes on where the record ends
    for before, after in zip([*first, *first], [*again, *third[:6]], strict=True):
        assert before.names == after.names
        assert before.objects("prompt") == after.objects("prompt")
        for name in ("tokens", "loss_mask", "sampler_logprobs", "versions"):
            assert before.ragged(name).values.tolist() == after.ragged(name).values.tolist()
        assert before.rewards.tolist() == after.rewards.tolist()
        assert before.row("staleness").tolist() == after.row("staleness").tolist()
    assert len((tmp_path / "played").read_text("utf-8")) == 24 + 4
    assert len(third) == 7


class Typist(ScriptedSampler):
    """Writes eight letters, one a second; a row that is aborted has those that it wrote."""

    loading, version = False, 0

    async def load(self, weights: Weights) -> Batch:
        self.loading = True
        await asyncio.sleep(2)
        places = await super().load(weights)
        self.loading, self.version = False, weights.version
        return places

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        assert not self.loading  # what was stopped waits for the new weights
        tokens, mask = [row.tolist() for row in prompts.tokens], [row.tolist() for row in prompts.loss_mask]
        self.asked += ["".join(map(chr, row)) for row in tokens]
        versions = [row.tolist() for row in prompts.versions]
        async with self.generate_calls.begin(sampling.beside) as call:
            going_on = True
            while going_on and (rows := [index for index, row in enumerate(mask) if sum(row) < 8]):
                await asyncio.sleep(1)
                if going_on := await call.step():
                    for index in rows:
                        tokens[index].append(ord("abcdefgh"[sum(mask[index])]))
                        mask[index].append(True)
                        versions[index].append(self.version)
        yield prompts.assign(
            tokens=Ragged.of(tokens, np.int32),
            loss_mask=Ragged.of(mask, np.bool_),
            versions=Ragged.of(versions, np.int32),
            sampler_logprobs=Ragged.of([np.full(len(row), -0.5) * row for row in mask], np.float32),
            completion=["abcdefgh"[: sum(row)] for row in mask],
            temperature=np.ones(len(mask), np.float32),
            truncated=np.zeros(len(mask), np.bool_),
            aborted=np.array([sum(row) < 8 for row in mask]),
        )


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
    (tmp_path / "talker.py").write_text(TALKER, "utf-8")

    async def main() -> list[list[int]]:
        policy, sampler, learnt = FakePolicy(PolicyConfig(model="none")), Typist([]), list[list[int]]()
        agents = agents_of(Agent(AgentConfig(source=f"{tmp_path / 'talker.py'}:solve")), sampler)
        await publish(policy, agents)
        prompts = (Batch.of(prompt=["a"], groups=np.array([step])) for step in range(8))
        clock = asyncio.get_running_loop().time
        async with rollouts(agents, prompts, Sampling(n=2), ahead=2, swap="abort") as stream:
            async for batch in stream:
                assert batch.rewards.tolist() == [1.0, 1.0]
                rows = conversations(batch.assign(advantages=batch.rewards))
                assert len(rows) == 2  # each episode is one conversation, whose answers came back as they were told
                learnt += [
                    row[np.asarray(mask, np.bool_)].tolist()
                    for row, mask in zip(rows.versions, rows.loss_mask, strict=True)
                ]
                await policy.update(rows, CrossEntropy())
                await asyncio.sleep(2.5)
                began = clock()
                await publish(policy, stream)
                assert clock() - began <= 2.5  # no episode is waited for
        assert any(asked.endswith(": abcd") for asked in sampler.asked)  # it was aborted, and asked to go on
        return learnt

    versions = simulate(main)
    assert len(versions) == 16
    for row in versions:
        assert len(row) == 24
        assert row == sorted(row)
    assert any(len(set(row[turn : turn + 8])) > 1 for row in versions for turn in (0, 8, 16))


class Refusing(Agents):
    """Refuses the weights of version 1 before the sampler has them."""

    async def load(self, weights: Weights) -> Batch:
        if weights.version == 1:
            raise DataError("refused")
        return await super().load(weights)


def test_programs_wait_no_longer_where_new_weights_do_not_come(tmp_path: Path) -> None:
    """Since they are refused, or since the sampler cannot be aborted."""
    (tmp_path / "talker.py").write_text(TALKER, "utf-8")

    class Failing(Typist):
        async def abort(self) -> None:
            raise DataError("no abort")

    async def main(kind: type[Typist], told: str) -> None:
        policy, sampler = FakePolicy(PolicyConfig(model="none")), kind([])
        agent = Agent(AgentConfig(source=f"{tmp_path / 'talker.py'}:solve"))
        agents = Refusing(sampler, agent, Gateway(sampler, ScriptedChat()))
        await publish(policy, agents)
        fresh = await policy.encode(Batch.of(prompt=["a"], completion=["b"]))
        prompts = [Batch.of(prompt=["a"], groups=np.array([0]))]
        async with rollouts(agents, prompts, Sampling(n=2), ahead=1, swap="abort") as stream:
            await asyncio.sleep(2.5)
            await policy.update(fresh, CrossEntropy())
            with pytest.raises(DataError, match=told):
                await publish(policy, stream)
            assert (await anext(stream)).rewards.tolist() == [1.0, 1.0]

    simulate(lambda: main(Typist, "refused"))
    simulate(lambda: main(Failing, "no abort"))


def test_episodes_are_trained_on_under_the_bound(agent: Agent) -> None:
    async def main(ahead: int) -> None:
        random = Random(ahead)
        sampler = delayed(ScriptedSampler, seed=ahead, generate=2.0, load=0.5)(
            lambda prompt: "o" * random.randrange(1, 9)
        )
        policy = FakePolicy(PolicyConfig(model="none"))
        witness = Witness(policy)
        agents = agents_of(agent, sampler)
        await publish(witness, agents)
        labels = np.arange(24).reshape(6, 4)
        prompts = (Batch.of(prompt=["a", "b", "aa", "aaa"], groups=some) for some in labels)
        trained: list[int] = []
        async with rollouts(agents, witness.prompts(prompts), Sampling(n=2, max_tokens=50), ahead=ahead) as stream:
            async for batch in stream:
                advantages = group_advantages(batch.rewards, batch.groups)
                rows = conversations(batch.assign(advantages=advantages))
                assert policy.version - min(rows.row("oldest_version").tolist()) <= ahead
                await policy.update(rows, CrossEntropy())
                trained += batch.groups.tolist()
                await publish(policy, stream)
        assert sorted(trained) == sorted([*range(24)] * 2)

    for ahead in (0, 1, 3):
        simulate(partial(main, ahead))
