"""Mistakes in a reward: found when it is named, or told on the row it was called for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

import meshrl as rl
from meshrl.rewards.function import FunctionReward
from meshrl_hf.text import character_tokenizer

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


def _reward(function: str) -> FunctionReward:
    Path("judge.py").write_text(JUDGE, "utf-8")
    return FunctionReward(rl.RewardConfig(function=function))


async def _told(function: str, **columns: list[str]) -> str:
    scored = await _reward(function).score(rl.Batch.of(prompt=["cat>"], completion=["tac"], **columns))
    assert scored.rewards.tolist() == [0.0]
    return str(scored.objects("reward_error")[0])


SIZES: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "num_labels": 1,
}


def _save_judge(labels: int = 1, weight: float = 1.0) -> None:
    sizes: dict[str, Any] = {**SIZES, "num_labels": labels}
    network = LlamaForSequenceClassification(LlamaConfig(**sizes))
    torch.nn.init.constant_(network.score.weight, weight)
    network.save_pretrained("judge")
    character_tokenizer("act>", 16).save_pretrained("judge")


async def _judge(completion: str = "tac") -> str:
    async with rl.Run(rl.RunConfig()) as run:
        judge = await run.spawn(rl.Reward, rl.RewardModelConfig(model="judge"))
        scored = await judge.score(rl.Batch.of(prompt=["cat>"], completion=[completion]))
    assert scored.rewards.tolist() == [0.0]
    return str(scored.objects("reward_error")[0])


async def judge_that_generates() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        model = rl.NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
        await (await run.spawn(rl.Policy, rl.PolicyConfig(model=model))).save("judge")
    await _judge()


async def judge_without_its_head() -> None:
    _save_judge()
    network = LlamaForSequenceClassification.from_pretrained("judge")
    tensors = {name: tensor for name, tensor in network.state_dict().items() if name != "score.weight"}
    network.save_pretrained("judge", state_dict=tensors)
    await _judge()


async def judge_of_two_labels() -> None:
    _save_judge(labels=2)
    await _judge()


async def judge_of_another_kind() -> None:
    _save_judge()
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained("judge")
    await _judge()


async def row_that_the_judge_cannot_read() -> str:
    _save_judge()
    return await _judge("dog")


async def row_too_long_for_the_judge() -> str:
    _save_judge()
    return await _judge("tac" * 5)


async def score_that_is_not_finite() -> str:
    _save_judge(weight=torch.nan)
    return await _judge()


def reward_file_that_raises() -> None:
    Path("broken.py").write_text("import numpyy\n", "utf-8")
    _reward("broken.py:judge")


MISTAKES: dict[str, Callable[[], object]] = {
    "unknown-reward": lambda: _reward("exactmatch"),
    "reward-file-missing": lambda: _reward("rewards/judge.py:judge"),
    "reward-package-missing": lambda: _reward("acme_judges.words:judge"),
    "reward-not-in-the-file": lambda: _reward("judge.py:juge"),
    "reward-that-is-no-function": lambda: _reward("judge.py:SCALE"),
    "reward-with-other-parameters": lambda: _reward("judge.py:pair"),
    "reward-that-raises": lambda: _told("judge.py:shout"),
    "reward-that-is-nan": lambda: _told("judge.py:divide"),
    "reward-that-is-none": lambda: _told("judge.py:forget"),
    "no-answer-to-compare": lambda: _told("exact_match"),
    "row-of-no-dataset": lambda: _told("reasoning_gym", answer=["tac"]),
}
