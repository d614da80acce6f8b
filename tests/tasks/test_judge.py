"""Rewards of a model that judges: what it is asked, what its answers mean, and what is kept of them."""

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import meshrl as rl
from meshrl.errors import ConfigError
from meshrl.roles import implementation
from meshrl.run.recorder import statistics


class Server:
    """A server of a judge that says what a function does."""

    def __init__(self, says: Callable[[str], str]) -> None:
        self.asked: list[str] = []
        self.says = says

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        text = body["messages"][-1]["content"]
        self.asked.append(text)
        message = {"role": "assistant", "content": self.says(text)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "a", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    @asynccontextmanager
    async def serving(self, **judge: Any) -> AsyncGenerator[rl.Reward]:
        """The reward of a judge that asks this server."""
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        table = {"url": f"http://127.0.0.1:{port}/v1", "model": "m", **judge}
        try:
            yield implementation(rl.Reward, "function")(
                rl.RewardConfig.model_validate(
                    {"functions": {"style": "judge", "right": "exact_match"}, "judge": table}
                )
            )
        finally:
            await server.shutdown()


def batch(*completions: str, groups: Any = None) -> rl.Batch:
    rows: Any = [{"topic": "birds"}] * len(completions)
    columns: dict[str, Any] = {} if groups is None else {"groups": np.array(groups)}
    same = {"prompt": ["Sing."] * len(completions), "answer": ["tweet"] * len(completions), "row": rows}
    return rl.Batch.of(completion=list(completions), **same, **columns)


def length(text: str) -> str:
    """The score of an answer is its length."""
    (answer,) = re.findall(r"<answer>\n(.*?)\n</answer>", text, re.DOTALL)
    return "What?" if answer == "odd" else f"It is long.\nSCORE: {len(answer)}"


async def test_a_rubric_judges_each_completion_beside_other_rewards() -> None:
    server = Server(length)
    async with server.serving(rubric="Sing of {topic}.", repeats=2) as reward:
        scored = await reward.score(batch("tweet", "tweet", "la", "odd"))
        assert scored.row("reward_style")[:3].tolist() == pytest.approx([0.5, 0.5, 0.2])
        assert scored.rewards[:3].tolist() == pytest.approx([1.5, 1.5, 0.2])
        assert np.isnan(scored.rewards[3])  # a judge without a verdict is not the completion's fault
        assert "style: Discard: the judge gave no verdict: 'What?'" in str(scored.objects("reward_error")[3])
        assert scored.row("reward_judge_agreement")[:3].tolist() == [1, 1, 1]
        asked = scored.objects("judge_prompt")[2]
        assert str(asked).startswith("<task>\nSing.\n</task>\n\n<answer>\nla\n</answer>\n\n<rubric>\nSing of birds.")
        assert scored.objects("judge_answer")[2] == "It is long.\nSCORE: 2"
        assert len(server.asked) == 2 * 3  # equal completions are asked about once
        await reward.score(batch("la"))
        assert len(server.asked) == 6
        assert (await statistics(scored))["reward/judge_agreement"] == 1.0


async def test_a_ranking_and_pairs_compare_the_completions_of_a_prompt() -> None:
    def shortest(text: str) -> str:
        answers = re.findall(r"<answer \d+>\n(.*?)\n</answer>", text, re.DOTALL)
        order = sorted(range(len(answers)), key=lambda at: len(answers[at]))
        if "BETTER" in text:
            return f"BETTER: {order[0] + 1}"
        return "RANKING: " + " > ".join(str(at + 1) for at in order)

    rows = batch("aaa", "a", "aa", "a", "alone", groups=[0, 0, 0, 0, 7])
    for by in ("ranking", "pairs"):
        server = Server(shortest)
        async with server.serving(by=by) as reward:
            scored = await reward.score(rows)
        assert scored.row("reward_style").tolist() == [0.0, 1.0, 0.5, 1.0, 0.5]
        assert len(server.asked) == {"ranking": 1, "pairs": 6}[by]
        assert "reward_judge_agreement" not in scored


async def test_a_judge_that_favours_the_first_is_seen_and_evened_out() -> None:
    server = Server(lambda _: "BETTER: 1")
    async with server.serving(by="pairs") as reward:
        assert (await reward.score(batch("a", "b", groups=[0, 0]))).row("reward_style").tolist() == [0.5, 0.5]
    said = iter(("SCORE: 0", "SCORE: 10/10"))
    server = Server(lambda _: next(said))
    async with server.serving(by="reference", repeats=2) as reward:
        scored = await reward.score(batch("tweet"))
    assert (scored.row("reward_style")[0], scored.row("reward_judge_agreement")[0]) == (0.5, 0.0)
    assert "<reference>\ntweet\n</reference>" in server.asked[0]


async def test_answers_are_kept_for_later_runs_and_a_judge_that_is_gone_is_told(tmp_path: Path) -> None:
    server = Server(length)
    async with server.serving(cache=str(tmp_path / "kept")) as reward:
        await reward.score(batch("la"))
    async with server.serving(cache=str(tmp_path / "kept"), retries=0) as reward:
        assert (await reward.score(batch("la"))).row("reward_style").tolist() == pytest.approx([0.2])
    assert len(server.asked) == 1
    scored = await reward.score(batch("other", "la"))  # after the server's end
    assert "gave no answer" in str(scored.objects("reward_error")[0])
    assert np.isnan(scored.rewards[0])
    assert not np.isnan(scored.rewards[1])


def test_a_table_without_its_function_and_a_key_that_is_missing() -> None:
    table = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    for wrong in ({"judge": table}, {"function": "judge"}):
        with pytest.raises(ValueError, match="belong together"):
            rl.RewardConfig.model_validate(wrong)
    config = rl.RewardConfig.model_validate({"function": "judge", "judge": {**table, "key_env": "NO_SUCH_KEY"}})
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        implementation(rl.Reward, "function")(config)
    assert json.loads(config.model_dump_json())["judge"]["by"] == "rubric"
