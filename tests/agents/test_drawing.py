"""Requests of many sessions, and the calls of a sampler that they share: who waits for whom, and what is given up."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest

from meshrl import Batch, Run, RunConfig, Sampling
from meshrl.agents import Gateway
from meshrl.mesh import current_rank
from meshrl.testing import ScriptedChat, ScriptedSampler
from tests.agents.talks import SAMPLING, Talk, opened, talking


class Timed(ScriptedSampler):
    """Takes as many seconds for a row as its prompt says, and tells which rows each call had and which calls ended."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f" {prompt} s")
        self.calls: list[list[str]] = []
        self.given_up: list[list[str]] = []

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        asked = ["".join(map(chr, tokens.tolist())) for tokens in prompts.tokens]
        self.calls.append(asked)
        begun = asyncio.get_running_loop().time()
        try:
            for index, seconds in sorted(enumerate(map(float, asked)), key=lambda each: each[1]):
                await asyncio.sleep(begun + seconds - asyncio.get_running_loop().time())
                async for batch in super().generate(prompts.select([index]), sampling):
                    yield batch
        except asyncio.CancelledError:
            self.given_up.append(asked)
            raise


@talking(Timed)
async def test_a_short_answer_waits_for_no_long_ones(talk: Talk) -> None:
    long: list[asyncio.Task[object]] = []
    for number in range(8):
        long.append(asyncio.create_task(talk.complete("3600", stop=f"<{number // 2}>")))
        await asyncio.sleep(1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(talk.complete("1") for _ in range(3)))
    assert loop.time() - began < 1.1  # in virtual time
    assert talk.sampler.calls[-1] == ["1"] * 3
    await asyncio.gather(*long)


@talking(Timed)
async def test_what_a_closed_session_waits_for_is_given_up(talk: Talk) -> None:
    running = asyncio.create_task(talk.complete("3600", n=2))
    await asyncio.sleep(1)
    waiting = asyncio.create_task(talk.complete("1800"))
    while len(talk.session.draws) < 2:  # noqa: ASYNC110 -- no time passes
        await asyncio.sleep(0)
    talk.rows()
    for asked in (running, waiting):
        with pytest.raises(openai.APIStatusError):
            await asked
    assert asyncio.get_running_loop().time() < 2
    await asyncio.sleep(1)
    assert talk.sampler.calls == talk.sampler.given_up == [["3600"] * 2]
    assert talk.session.failure is None


@talking(Timed)
async def test_sessions_share_a_call_that_goes_on_for_those_that_are_left(talk: Talk) -> None:
    async with opened(talk.gateway) as other:
        gone, kept = asyncio.create_task(other.complete("3600")), asyncio.create_task(talk.complete("60"))
        await asyncio.sleep(1)
        other.rows()
        assert (await kept).choices[0].text == " 60 s"
        with pytest.raises(openai.APIStatusError):
            await gone
    assert talk.sampler.calls == talk.sampler.given_up == [["3600", "60"]]


class Slow(ScriptedSampler):
    """As a mesh, whose stream ends after its last batch."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "hi")

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for batch in super().generate(prompts, sampling):
            yield batch
            await asyncio.sleep(0.5)


@talking(Slow)
async def test_an_aborted_answer_goes_on_while_the_call_that_it_was_of_still_ends(talk: Talk) -> None:
    asking = [asyncio.create_task(talk.complete(each)) for each in ("1", "2", "3")]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    await talk.sampler.abort()
    assert [(await told).choices[0].text for told in asking] == ["hi"] * 3
    assert len(talk.rows()) == 3


async def test_what_a_client_that_has_gone_asked_for_is_given_up() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Endless(ScriptedSampler):
        async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            yield prompts

    async with Gateway(Endless([]), ScriptedChat()).serving() as gateway:
        session = gateway.open(SAMPLING)
        async with httpx2.AsyncClient(trust_env=False) as http:
            body, headers = {"model": "any", "prompt": "1"}, {"Authorization": f"Bearer {session.token}"}
            asked = asyncio.create_task(http.post(f"{session.url}/completions", json=body, headers=headers))
            await begun.wait()
            asked.cancel()
            await ended.wait()
        assert session.failure is None


class SaysItsRank(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__(lambda prompt: str(current_rank().index))


async def test_rows_that_come_one_at_a_time_go_to_all_ranks(tmp_path: Path) -> None:
    async with Run(RunConfig(name="ranks", folder=str(tmp_path), log=[])) as run:
        gateway = Gateway(await (await run.mesh(2)).spawn(SaysItsRank), ScriptedChat())
        async with opened(gateway) as talk:
            gateway.pause()  # until all are there: a call for each
            asking = [asyncio.create_task(talk.complete("?", stop=stop)) for stop in "abcd"]
            while len(talk.session.draws) < 4:  # noqa: ASYNC110 -- the gateway tells nobody
                await asyncio.sleep(0.01)
            gateway.resume()
            told = await asyncio.gather(*asking)
        await gateway.aclose()
    assert sorted(each.choices[0].text for each in told) == ["0", "0", "1", "1"]
