"""Episodes: masks, token ids, versions, broken environments, aborts and room, on the torch sampler and on fakes."""

import asyncio
from collections.abc import AsyncIterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.overlap.stream_state import SwapMode
from meshrl.roles import Completion, completed
from meshrl.tasks.environment import FunctionEnvironment
from meshrl.testing import FakeSampler, ScriptedSampler

GAMES = """
import asyncio, pathlib

def note(what):
    with pathlib.Path(__file__).with_name("noted").open("a") as noted:
        noted.write(what)

class Count:
    '''Over after `rounds` turns; says b after each and rewards each a.'''
    def __init__(self, rounds=3):
        self.rounds = rounds
        note("made,")
    def reset(self, row):
        return row["prompt"] + ">"
    async def step(self, completion):
        await asyncio.sleep(0)
        self.rounds -= 1
        return "bb", float(completion.count("a")), self.rounds == 0
    def close(self):
        note("closed,")

class Endless(Count):
    def step(self, completion):
        return "bbbb", 1.0, False

class Broken(Count):
    def reset(self, row):
        if row["prompt"] == "aa":
            raise ValueError("no such word")
        return super().reset(row)
    async def step(self, completion):
        if self.rounds == 2:
            raise RuntimeError("the game crashed")
        await super().step(completion)
        return "b", 1.0, False

"""

MODEL = rl.NewModel(characters="abc>", hidden_size=16, ffn_size=16, layers=1, heads=2, max_tokens=64)
PROMPTS = rl.Batch.of(prompt=["a", "aa", "abc"], answer=["x", "y", "z"], row=[{}, {}, {}], groups=np.arange(3))


@pytest.fixture
def games(tmp_path: Path) -> str:
    path = tmp_path / "my_games.py"
    path.write_text(GAMES, "utf-8")
    return str(path)


def noted(games: str) -> tuple[int, int]:
    text = Path(games).with_name("noted").read_text("utf-8")
    return text.count("made,"), text.count("closed,")


async def made(run: rl.Run, config: rl.EnvironmentConfig, max_tokens: int = 64) -> tuple[rl.Policy, rl.Episodes]:
    model = MODEL.model_copy(update={"max_tokens": max_tokens})
    policy = await run.spawn(rl.Policy, rl.PolicyConfig(model=model))
    sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(model=model))
    await rl.publish(policy, sampler)
    return policy, rl.Episodes(sampler, await run.spawn(rl.Environment, config), config)


def turns_of(batch: rl.Batch, row: int) -> list[tuple[bool, list[int]]]:
    """The stretches of one row's tokens that are learnt, and those that are not."""
    pairs = zip(batch.loss_mask[row].tolist(), batch.tokens[row].tolist(), strict=True)
    return [(learnt, [token for _, token in some]) for learnt, some in groupby(pairs, key=itemgetter(0))]


def check_versions(batch: rl.Batch) -> NDArray[np.bool_]:
    """What is learnt has a version, and nothing else has; what is learnt."""
    learnt, versions = np.asarray(batch.loss_mask.values, np.bool_), np.asarray(batch.versions.values, np.int32)
    assert (versions[learnt] >= 0).all()
    assert (versions[~learnt] == -1).all()
    return learnt


async def test_what_the_environment_wrote_is_not_learnt(games: str, tmp_path: Path) -> None:
    async with rl.Run(rl.RunConfig(folder=str(tmp_path))) as run:
        policy, episodes = await made(run, rl.EnvironmentConfig(source=f"{games}:Count"))
        batch = await rl.rollout(episodes, PROMPTS, rl.Sampling(n=4, max_tokens=5))
        logprobs = (await (await policy.logprobs(batch)).load()).ragged("logprobs")
        _, others = await made(run, rl.EnvironmentConfig(source=f"{games}:Count"))
        async with rl.rollouts(others, [PROMPTS], rl.Sampling(n=4, max_tokens=5)) as stream:
            assert (await anext(stream)).drop("staleness") == batch.drop("aborted"), "with ahead=0"
    assert batch.groups.tolist() == np.repeat(np.arange(3), 4).tolist()
    assert batch.objects("prompt") == tuple(text + ">" for text in ("a", "aa", "abc") for _ in range(4))
    assert batch.row("turns").tolist() == [3] * 12
    for row in range(len(batch)):
        stretches = turns_of(batch, row)
        assert [learnt for learnt, _ in stretches] == [False, True] * 3
        assert [tokens for learnt, tokens in stretches if not learnt][1:] == [[3, 3]] * 2
        said = ["".join(" $abc>"[token] for token in tokens if token > 1) for learnt, tokens in stretches if learnt]
        assert batch.objects("completion")[row] == "bb".join(said)
        assert batch.rewards[row] == "".join(said).count("a")
    learnt = check_versions(batch)
    assert not batch.sampler_logprobs.values[~learnt].any()
    # To the trainer, which reads the whole row at once, each turn has the log-probs that it was drawn with.
    assert batch.sampler_logprobs.values[learnt] == pytest.approx(logprobs.values[learnt], abs=1e-4)
    assert set(batch.row("oldest_version").tolist()) == {0}
    assert batch.objects("reward_error") == (None,) * 12


class Pairs(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__([])
        self.turns: list[rl.Batch] = []

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        self.turns.append(prompts)
        had = [row.tolist() for row in prompts.versions] if "tokens" in prompts else [[]] * len(prompts)
        given = [[*row.tolist(), 50] for row in prompts.tokens] if "tokens" in prompts else [[1]] * len(prompts)
        drawn = [Completion("a", row, [70, 71], [0.0, 0.0]) for row in given]
        rows = completed(prompts, drawn, len(self.turns), sampling)
        versions = [[*before, *row.tolist()[len(before) :]] for before, row in zip(had, rows.versions, strict=True)]
        yield rows.assign(versions=rl.Ragged.of(versions, np.int32))


async def test_tokens_are_kept_as_they_were_drawn_with_their_versions(games: str) -> None:
    config = rl.EnvironmentConfig(source=f"{games}:Count")
    sampler = Pairs()
    batch = await rl.rollout(rl.Episodes(sampler, FunctionEnvironment(config), config), PROMPTS, rl.Sampling())
    assert batch.tokens[0].tolist() == [1, 70, 71, 50, 70, 71, 50, 70, 71]
    assert batch.versions[0].tolist() == [-1, 1, 1, -1, 2, 2, -1, 3, 3]
    assert batch.loss_mask[0].tolist() == [False, True, True, False, True, True, False, True, True]
    assert batch.row("oldest_version").tolist() == [1, 1, 1]
    assert [asked.objects("observation")[0] for asked in sampler.turns] == [None, "bb", "bb"]
    assert not any(asked.loss_mask.values.any() for asked in sampler.turns[1:])
    assert batch.rewards.tolist() == [3, 3, 3]


async def test_a_broken_environment_is_data_on_its_row(games: str, tmp_path: Path) -> None:
    async with rl.Run(rl.RunConfig(folder=str(tmp_path))) as run:
        config = rl.EnvironmentConfig(source=f"{games}:Broken", options={"rounds": 3})
        _, episodes = await made(run, config)
        with capture_logs() as logs:
            batch = await rl.rollout(episodes, PROMPTS, rl.Sampling(n=2, max_tokens=3))
    crashed = "RuntimeError: the game crashed"
    assert batch.objects("reward_error") == (crashed, crashed, *["ValueError: no such word"] * 2, crashed, crashed)
    assert np.isnan(batch.rewards).all()
    assert batch.row("turns").tolist() == [2, 2, 0, 0, 2, 2]
    assert not batch.loss_mask.values.any()
    assert [log["error"] for log in logs] == ["ValueError: no such word", crashed]


async def test_the_limit_of_turns_and_of_room_end_an_episode(games: str, tmp_path: Path) -> None:
    async with rl.Run(rl.RunConfig(folder=str(tmp_path))) as run:
        config = rl.EnvironmentConfig(source=f"{games}:Endless", turns=2, template="c{observation}c")
        _, episodes = await made(run, config)
        batch = await rl.rollout(episodes, PROMPTS, rl.Sampling(n=2, max_tokens=3))
        _, episodes = await made(run, rl.EnvironmentConfig(source=f"{games}:Endless", turns=50), max_tokens=24)
        full = await rl.rollout(episodes, PROMPTS, rl.Sampling(n=2, max_tokens=6))
    assert batch.row("turns").tolist() == [2] * 6
    assert batch.row("truncated").all()
    assert batch.rewards.tolist() == [2] * 6
    assert turns_of(batch, 0)[2] == (False, [4, 3, 3, 3, 3, 4])
    assert full.lengths.max() <= 24
    assert full.row("truncated").all()
    assert np.asarray(full.row("turns"), np.int32).min() > 1
    assert full.rewards.tolist() == full.row("turns").tolist()
    assert noted(games) == (12, 12)


@pytest.mark.parametrize("swap", ["in_flight", "abort"])
async def test_episodes_stream(games: str, tmp_path: Path, swap: SwapMode) -> None:
    batches = [PROMPTS.assign(groups=np.arange(3) + 3 * number) for number in range(3)]
    async with rl.Run(rl.RunConfig(folder=str(tmp_path))) as run:
        policy, episodes = await made(run, rl.EnvironmentConfig(source=f"{games}:Count"))
        async with rl.rollouts(episodes, batches, rl.Sampling(n=2, max_tokens=8), ahead=2, swap=swap) as stream:
            seen: list[int] = []
            async for batch in stream:
                seen += batch.groups.tolist()
                for _ in range(20):  # rollouts go on
                    await asyncio.sleep(0)
                assert batch.row("staleness").max() <= 2
                assert batch.row("turns").tolist() == [3] * 6
                check_versions(batch)
                assert all(len(turns_of(batch, row)) == 6 for row in range(6))
                newer = (await policy.weights()).with_version(stream.ledger.version + 1)
                with stream.announced():
                    await stream.load(newer)
    assert sorted(seen) == np.repeat(np.arange(9), 2).tolist()
    assert noted(games) == (18, 18)


async def test_on_fakes_with_several_ranks_of_the_environment(games: str, tmp_path: Path) -> None:
    meshes = {"games": {"ranks": 2}}
    async with rl.Run(rl.RunConfig.model_validate({"folder": str(tmp_path), "meshes": meshes})) as run:
        config = rl.EnvironmentConfig(source=f"{games}:Count", mesh="games")
        sampler = FakeSampler(rl.SamplerConfig(model="none"))
        episodes = rl.Episodes(sampler, await run.spawn(rl.Environment, config), config)
        batch = await rl.rollout(episodes, PROMPTS, rl.Sampling(n=3))
    assert batch.row("turns").tolist() == [3] * 9
    assert batch.objects("completion")[0] == "a>bba>bba>"
    assert "".join(map(chr, batch.tokens[0].tolist())) == "a>a>\0bba>\0bba>\0"
    assert batch.rewards.tolist() == [3] * 3 + [6] * 3 + [3] * 3


async def test_a_reward_function_is_an_environment_of_one_turn() -> None:
    config = rl.EnvironmentConfig(source="reward:exact_match")
    environment = FunctionEnvironment(config)
    begun = await environment.reset(PROMPTS.assign(episode=np.arange(3)))
    told = await environment.step(begun.assign(completion=["x", "no", "z"]))
    assert begun.objects("prompt") == PROMPTS.objects("prompt")
    assert (told.rewards.tolist(), told.row("done").tolist()) == ([1, 0, 1], [True] * 3)
