"""Requests of many sessions, and the calls of a sampler that they share: who waits for whom, and what is given up."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from meshrl import Batch, Gather, Run, RunConfig, Sampling, endpoint, respawn
from meshrl.agents import Gateway, Session
from meshrl.mesh import current_rank
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate
from tests.agents.talks import USER, client_of


@dataclass
class Timed(ScriptedSampler):
    """Takes as many seconds for a row as its prompt says, and tells which rows each call had and which calls ended."""

    calls: list[list[str]] = field(default_factory=list)
    given_up: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(lambda prompt: f" {prompt} s")

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


Ask = Callable[..., Coroutine[Any, Any, Any]]


def play(program: Callable[[Gateway, Timed, Session, Ask], Any]) -> None:
    """A program that asks for completions, in virtual time."""

    async def main() -> None:
        sampler = Timed()
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session.url, session.token) as client:

            async def ask(seconds: float, **more: Any) -> Any:
                return await client.completions.create(model="any", prompt=str(seconds), **more)

            await program(gateway, sampler, session, ask)
        await gateway.aclose()

    simulate(main)


def test_a_short_answer_waits_for_no_long_ones() -> None:
    async def program(gateway: Gateway, sampler: Timed, session: Session, ask: Ask) -> None:
        long = []
        for number in range(8):
            stop = {"stop": f"<{number}>"} if number % 2 else {}
            long.append(asyncio.create_task(ask(3600, **stop)))
            await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(ask(1) for _ in range(3)))
        assert loop.time() - began < 1.1  # in virtual time
        assert sampler.calls[-1] == ["1"] * 3
        await asyncio.gather(*long)

    play(program)


def test_what_a_closed_session_waits_for_is_given_up() -> None:
    async def program(gateway: Gateway, sampler: Timed, session: Session, ask: Ask) -> None:
        running = asyncio.create_task(ask(3600, n=2))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(ask(1800))
        while len(session.draws) < 2:  # noqa: ASYNC110 -- no time passes
            await asyncio.sleep(0)
        gateway.close(session)
        for asked in (running, waiting):
            with pytest.raises(openai.APIStatusError):
                await asked
        assert asyncio.get_running_loop().time() < 2
        await asyncio.sleep(1)
        assert sampler.calls == sampler.given_up == [["3600"] * 2]
        assert session.failure is None

    play(program)


def test_a_call_goes_on_for_the_sessions_that_are_there() -> None:
    async def program(gateway: Gateway, sampler: Timed, session: Session, ask: Ask) -> None:
        other = gateway.open(session.sampling)
        async with client_of(gateway, other.url, other.token) as client:
            gone = asyncio.create_task(client.completions.create(model="any", prompt="3600"))
            kept = asyncio.create_task(ask(60))
            await asyncio.sleep(1)
            gateway.close(other)
            assert (await kept).choices[0].text == " 60 s"
            with pytest.raises(openai.APIStatusError):
                await gone
        assert sampler.calls == sampler.given_up == [["3600", "60"]]

    play(program)


def test_sessions_share_calls_of_the_sampler() -> None:
    async def program(gateway: Gateway, sampler: Timed, session: Session, ask: Ask) -> None:
        async def agent() -> None:
            own = gateway.open(session.sampling)
            async with client_of(gateway, own.url, own.token) as client:
                for _ in range(3):
                    await client.completions.create(model="any", prompt="1")
            assert len(gateway.close(own)) == 3

        await asyncio.gather(*(agent() for _ in range(64)))
        assert sum(map(len, sampler.calls)) == 64 * 3
        assert len(sampler.calls) < 16

    play(program)


def test_an_aborted_answer_goes_on_while_the_call_that_it_was_of_still_ends() -> None:
    class Slow(ScriptedSampler):
        async def generate(self, prompts: Any, sampling: Any) -> AsyncGenerator[Any]:
            async for batch in super().generate(prompts, sampling):
                yield batch
                await asyncio.sleep(0.5)  # as a mesh, whose stream ends after its last batch

    async def main() -> None:
        sampler = Slow(lambda prompt: "hi")
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session.url, session.token) as client:
            asking = [asyncio.create_task(client.completions.create(model="", prompt=each)) for each in ("1", "2", "3")]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            await sampler.abort()
            assert [(await told).choices[0].text for told in asking] == ["hi"] * 3
        await gateway.aclose()
        assert len(gateway.close(session)) == 3

    simulate(main)


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
        session = gateway.open(Sampling(max_tokens=1000))
        async with httpx2.AsyncClient(trust_env=False) as http:
            body, headers = {"model": "any", "prompt": "1"}, {"Authorization": f"Bearer {session.token}"}
            asked = asyncio.create_task(http.post(f"{session.url}/completions", json=body, headers=headers))
            await begun.wait()
            asked.cancel()
            await ended.wait()
        assert session.failure is None


async def test_rows_that_come_one_at_a_time_go_to_all_ranks(tmp_path: Path) -> None:
    async with Run(RunConfig(name="ranks", folder=str(tmp_path), log=[])) as run:
        sampler = await (await run.mesh(2)).spawn(SaysItsRank)
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session.url, session.token) as client:
            ask = client.completions.create
            told = await asyncio.gather(*(ask(model="any", prompt="?", stop=stop) for stop in "abcd"))
        await gateway.aclose()
    assert sorted(each.choices[0].text for each in told) == ["0", "0", "1", "1"]


class SaysItsRank(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__(lambda prompt: str(current_rank().index))


class Lasting(ScriptedSampler):
    """Says its process, and to "wait" nothing for long."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: str(os.getpid()))

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for batch in super().generate(prompts, sampling):
            if "wait" in self.asked[-1]:
                await asyncio.sleep(600)
            yield batch

    @endpoint
    async def pid(self) -> Gather[NDArray[np.int64]]:
        return np.array([os.getpid()])


@pytest.mark.process
async def test_a_rank_that_is_killed_is_told_and_one_that_comes_back_goes_on(tmp_path: Path) -> None:
    async with Run(RunConfig(name="killed", folder=str(tmp_path), engine="processes", log=[])) as run:
        sampler = await (await run.mesh(1)).spawn(Lasting)
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=100))
        async with client_of(gateway, session.url, session.token) as client:
            ask = client.chat.completions.create
            first = (await ask(model="policy", messages=[USER])).choices[0].message
            messages: list[Any] = [USER, first, USER]
            waits = asyncio.create_task(ask(model="policy", messages=[*messages, {"role": "user", "content": "wait"}]))
            (pid,) = (await sampler.pid()).tolist()
            assert first.content == str(pid)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(openai.InternalServerError, match="the sampler failed: RankDied"):
                await waits
            await respawn(sampler)
            again = (await ask(model="policy", messages=messages)).choices[0].message
        assert again.content == str((await sampler.pid()).tolist()[0]) != first.content
        rows = gateway.close(session)
        assert [int(mask.sum()) for mask in rows.loss_mask] == [len(f"{first.content}\0{again.content}\0")]
