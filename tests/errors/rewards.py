"""Mistakes in rewards and environments: found when one is named, or told on the row it was called for."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

import meshrl as rl
from meshrl.agents import Agent, Gateway
from meshrl.agents.config import load_agent
from meshrl.config import validate
from meshrl.tasks.environment import FunctionEnvironment
from meshrl.tasks.function import FunctionReward
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate
from meshrl_torch.model.text import character_tokenizer

JUDGE = """
SCALE = 2.0
def judge(prompt, completion, row):
    return SCALE
def pair(completion, answer):
    return float(completion == answer)
def shout(prompt, completion, row):
    return float(row["word"] == completion)
def divide(prompt, completion, row):
    return float("nan")
def forget(prompt, completion, row):
    print(completion)
"""
GAMES = """
class Guess:
    def __init__(self, highest=9):
        self.highest = highest
    def reset(self, row):
        return row["question"]
    def step(self, completion):
        return "wrong", 0.0
class Oracle:
    def ask(self, row):
        return ""
def play(row):
    return ""
"""
ROW = rl.Batch.of(prompt=["cat>"], completion=["tac"])
LAYER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES: dict[str, Any] = {**LAYER, "vocab_size": 6, "max_position_embeddings": 16}


def _reward(function: str) -> FunctionReward:
    Path("judge.py").write_text(JUDGE, "utf-8")
    Path("broken.py").write_text("import numpyy\n", "utf-8")
    return FunctionReward(rl.RewardConfig(function=function))


def _rewards(**table: object) -> None:
    validate(rl.RewardConfig, table, "mine.toml")


async def _told(reward: rl.Reward, batch: rl.Batch = ROW) -> str:
    scored = await reward.score(batch)
    assert np.isnan(scored.rewards).all()
    return str(scored.objects("reward_error")[0])


def _save_judge(labels: int = 1, weight: float = 1.0) -> LlamaForSequenceClassification:
    sizes: dict[str, Any] = {**SIZES, "num_labels": labels}
    network = LlamaForSequenceClassification(LlamaConfig(**sizes))
    torch.nn.init.constant_(network.score.weight, weight)
    network.save_pretrained("judge")
    character_tokenizer("act>", 16).save_pretrained("judge")
    return network


async def _judge(completion: str = "tac") -> str:
    async with rl.Run(rl.RunConfig()) as run:
        judge = await run.spawn(rl.Reward, rl.RewardModelConfig(model="judge"))
        return await _told(judge, ROW.assign(completion=[completion]))


async def _judged(completion: str = "tac", labels: int = 1, weight: float = 1.0) -> str:
    _save_judge(labels, weight)
    return await _judge(completion)


async def judge_that_generates() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        model = rl.NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
        await (await run.spawn(rl.Policy, rl.PolicyConfig(model=model))).save("judge")
    await _judge()


async def judge_without_its_head() -> None:
    network = _save_judge()
    tensors = {name: tensor for name, tensor in network.state_dict().items() if name != "score.weight"}
    network.save_pretrained("judge", state_dict=tensors)
    await _judge()


async def judge_of_another_kind() -> None:
    _save_judge()
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained("judge")
    await _judge()


def _environment(source: str, **options: int) -> FunctionEnvironment:
    Path("games.py").write_text(GAMES, "utf-8")
    table = {"source": source, "options": options}
    return FunctionEnvironment(validate(rl.EnvironmentConfig, table, "environment"))


async def _played(*turns: str, row: dict[str, str]) -> str:
    environment = _environment("games.py:Guess")
    batch = await environment.reset(rl.Batch.of(prompt=["1 to 9>"], episode=np.zeros(1, np.int64), row=[row]))
    for turn in turns:
        batch = await environment.step(batch.assign(completion=[turn]))
    return str(batch.objects("reward_error")[0])


def _verifiers(version: str = "", *, has_python: bool = True) -> None:
    python = Path("python")
    python.symlink_to(sys.executable)  # a link knows no packages of this environment
    if version:
        Path("verifiers.py").write_text(f'__version__ = "{version}"\n', "utf-8")
    options = {"python": "./python"} if has_python else {}
    load_agent(rl.AgentConfig(source="verifiers:wordle", options=options))


def _full_disk() -> None:
    write = 'raise OSError(errno.ENOSPC, "No space left on device", "notes.txt")'
    Path("mine.py").write_text(f"import errno\n\n\nasync def solve(client, row):\n    {write}\n", "utf-8")
    agent, gateway = Agent(rl.AgentConfig(source="mine.py:solve")), Gateway(ScriptedSampler([]), ScriptedChat())
    simulate(lambda: agent.play(gateway, {}, rl.Sampling()))


MISTAKES: dict[str, Callable[[], object]] = {
    "disk-that-is-full-for-an-agent": _full_disk,
    "unknown-reward": lambda: _reward("exactmatch"),
    "reward-file-missing": lambda: _reward("rewards/judge.py:judge"),
    "reward-file-that-raises": lambda: _reward("broken.py:judge"),
    "reward-package-missing": lambda: _reward("acme_judges.words:judge"),
    "reward-not-in-the-file": lambda: _reward("judge.py:juge"),
    "reward-that-is-no-function": lambda: _reward("judge.py:SCALE"),
    "reward-with-other-parameters": lambda: _reward("judge.py:pair"),
    "two-kinds-of-rewards": lambda: _rewards(function="exact_match", functions={"short": "rewards.py:short"}),
    "weight-of-no-reward": lambda: _rewards(functions={"correct": "exact_match"}, weights={"corect": 2.0}),
    "reward-without-a-name": lambda: _rewards(functions={"error": "exact_match"}),
    "reward-that-raises": lambda: _told(_reward("judge.py:shout")),
    "reward-that-is-nan": lambda: _told(_reward("judge.py:divide")),
    "reward-that-is-none": lambda: _told(_reward("judge.py:forget")),
    "reward-that-runs-no-tests": lambda: _told(_reward("code_tests")),
    "no-answer-to-compare": lambda: _told(_reward("exact_match")),
    "row-of-no-dataset": lambda: _told(_reward("reasoning_gym"), ROW.assign(answer=["tac"])),
    "judge-of-two-labels": lambda: _judged(labels=2),
    "row-that-the-judge-cannot-read": lambda: _judged("dog"),
    "row-too-long-for-the-judge": lambda: _judged("tac" * 5),
    "score-that-is-not-finite": lambda: _judged(weight=torch.nan),
    "unknown-environment": lambda: _environment("retri"),
    "environment-not-in-the-file": lambda: _environment("games.py:Gess"),
    "environment-that-is-no-class": lambda: _environment("games.py:play"),
    "environment-without-methods": lambda: _environment("games.py:Oracle"),
    "environment-of-other-options": lambda: _environment("games.py:Guess", most=9),
    "environment-of-verifiers": lambda: _environment("verifiers:wordle"),
    "verifiers-missing": lambda: _verifiers(has_python=False),
    "verifiers-not-installed": _verifiers,
    "verifiers-of-another-version": lambda: _verifiers("0.3.1"),
    "template-without-the-observation": lambda: validate(
        rl.EnvironmentConfig, {"source": "retry", "template": "{text}"}, "mine.toml"
    ),
    "environment-that-raises": lambda: _played(row={"word": "cat"}),
    "step-without-done": lambda: _played("5", row={"question": "1 to 9>"}),
    "step-after-the-end": lambda: _played("5", "5", row={"question": "1 to 9>"}),
}
