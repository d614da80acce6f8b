"""A reward that could not be given is unknown, not zero: masked, counted, and never learned from."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

import meshrl as rl
from meshrl.algo import Gae, gae, whiten
from meshrl.data import with_rewards
from meshrl.errors import DataError
from meshrl.run.recorder import statistics
from meshrl.tasks.function import FunctionReward

NAN = float("nan")
REWARDS = np.array([-2, -4, NAN, -4, 1, NAN, NAN, 3, 5], np.float32)
GROUPS = np.array([0, 0, 0, 0, 1, 1, 2, 3, 3])


def rows(rewards: list[float], errors: list[str | None], on_error: str = "mask") -> rl.Batch:
    mask = rl.Ragged.of([[False, True, True]] * len(rewards), np.bool_)
    batch = rl.Batch.of(
        tokens=rl.Ragged.of([[1, 2, 3]] * len(rewards), np.int32),
        loss_mask=mask,
        groups=np.zeros(len(rewards), np.int64),
    )
    return with_rewards(batch, rewards, errors, on_error)  # type: ignore[arg-type]


def test_a_critic_and_whitening_do_not_see_the_row() -> None:
    batch = rows([1, 0, 3], [None, "down", None])
    values = rl.Ragged(np.full(9, 0.5, np.float32), batch.tokens.offsets)
    whole = rl.Ragged.of([[False, True, True]] * 3, np.bool_)
    advantages, returns = gae(batch.rewards, values, whole, Gae())
    assert not advantages[1].any()
    assert returns[1].tolist() == [0, 0.5, 0.5]
    found = whiten(rl.rewards_to_go(batch.rewards, batch.loss_mask), batch.loss_mask)
    assert [row.tolist() for row in found] == [[0, -1, -1], [0, 0, 0], [0, 1, 1]]
    assert [part.rewards.tolist() for part in rl.minibatches(batch, 1, 1, 0)] == [[1, 3]]


def test_pairs_and_filters_take_known_rewards_only() -> None:
    batch = rl.Batch.of(rewards=REWARDS, groups=GROUPS, row=np.arange(9)).select([0, 1, 2, 3, 4, 5, 7, 8])
    pairs = rl.best_and_worst(batch)
    assert (pairs.rewards.tolist(), pairs.row("preferred").tolist()) == ([-2, -4, 5, 3], [1, -1, 1, -1])
    assert rl.has_signal(batch).tolist() == [True] * 4 + [False] * 2 + [True] * 2


def functions() -> tuple[Callable[..., float], Callable[..., float], Callable[..., list[float | None]]]:
    """Local ones, which another process gets by value."""

    def judge(prompt: str, completion: str, row: object) -> float:
        if completion == "raises":
            raise ConnectionError("the judge does not answer")
        return float("nan") if completion == "nan" else -float(len(completion))

    def one(prompt: str, completion: str, row: object) -> float:
        return 1.0

    def abstains(prompts: list[str], completions: list[str]) -> list[float | None]:
        return [None if "?" in text else 2.0 for text in completions]

    return judge, one, abstains


judge, one, abstains = functions()


async def scored(completions: list[str], **table: object) -> rl.Batch:
    batch = rl.Batch.of(prompt=["p"] * len(completions), completion=completions)
    return await FunctionReward(rl.RewardConfig(**table)).score(batch)  # type: ignore[arg-type]


TEXTS = ["aa", "nan", "raises", "bbbb"]


def test_what_a_failure_costs_is_configured() -> None:
    assert asyncio.run(scored(TEXTS, function=judge, errors="zero")).rewards.tolist() == [-2, 0, 0, -4]
    zero = asyncio.run(scored(TEXTS, functions={"judge": judge, "one": one}, errors="zero"))
    assert zero.rewards.tolist() == [-1, 1, 1, -3]
    with pytest.raises(DataError, match="row 1, of the prompt 'p', has no reward: ValueError"):
        asyncio.run(scored(TEXTS, function=judge, errors="stop"))


def test_a_sum_leaves_out_what_does_not_apply() -> None:
    trl = rl.from_trl(abstains)
    batch = asyncio.run(scored(["a", "?"], functions={"trl": trl, "one": one}))
    assert (batch.rewards.tolist(), batch.objects("reward_error")) == ([3, 1], (None, None))
    batch = asyncio.run(scored(["a", "?"], function=trl))
    assert batch.rewards == pytest.approx([2, NAN], nan_ok=True)


def test_metrics_count_the_share_and_a_step_of_unknown_rewards_ends_with_the_cause() -> None:
    told = asyncio.run(statistics(rows([1, 0, 3], [None, "down", None])))
    assert told["unknown_rewards"] == pytest.approx(1 / 3)
    assert (told["reward"], told["reward_errors"]) == (2, 1)
    assert told["completion_tokens"] == 2
    part = rows([1, 2], [None, None]).assign(reward_part=np.full(2, np.nan, np.float32))
    assert "reward/part" not in asyncio.run(statistics(part)), "there is no mean over no rows"
    every = rows([0, 0], ["down", "off"])
    for learn in (lambda: asyncio.run(statistics(every)), lambda: list(rl.minibatches(every, 1, 1, 0))):
        with pytest.raises(DataError, match=r"none of the 2 rows .*: down"):
            learn()
    zeros = rows([0, 0], ["down", "off"], "zero")
    assert asyncio.run(statistics(zeros))["reward_errors"] == 2
    assert sum(map(len, rl.minibatches(zeros, 1, 1, 0))) == 2
