"""Requests of many sessions, and the calls of the sampler that they share: who waits for whom, and what is given up."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from meshrl import Batch, Run, RunConfig, Sampling
from meshrl.agents import Gateway, Session
from meshrl.mesh import current_rank
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate


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


def client_of(gateway: Gateway, session: Session) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
    return openai.AsyncOpenAI(base_url=session.url, api_key=session.token, max_retries=0, http_client=http)


def play(program: Callable[[Gateway, Timed, Session, Ask], Any]) -> None:
    """A program that asks for completions, in virtual time."""

    async def main() -> None:
        sampler = Timed()
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session) as client:

            async def ask(seconds: float, **more: Any) -> Any:
                return await client.completions.create(model="any", prompt=str(seconds), **more)

            await program(gateway, sampler, session, ask)
        await gateway.aclose()

    simulate(main)


@pytest.mark.parametrize("own_stops", [False, True])
def test_a_short_answer_waits_for_no_long_ones(own_stops: bool) -> None:
    async def program(gateway: Gateway, sampler: Timed, session: Session, ask: Ask) -> None:
        long = []
        for number in range(8):
            stop = {"stop": f"<{number}>"} if own_stops else {}
            long.append(asyncio.create_task(ask(3600, **stop)))
            await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(ask(1) for _ in range(3)))
        assert loop.time() - began < 1.1
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
        async with client_of(gateway, other) as client:
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
    sizes: list[int] = []

    class Counting(ScriptedSampler):
        async def generate(self, prompts: Any, sampling: Any) -> AsyncGenerator[Any]:
            sizes.append(len(prompts))
            await asyncio.sleep(1)
            async for batch in super().generate(prompts, sampling):
                yield batch

    async def main() -> None:
        gateway = Gateway(Counting(lambda prompt: prompt), ScriptedChat())

        async def agent() -> None:
            session = gateway.open(Sampling(max_tokens=1000))
            async with client_of(gateway, session) as client:
                for turn in range(3):
                    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": str(turn)}])
            assert len(gateway.close(session)) == 3

        await asyncio.gather(*(agent() for _ in range(256)))

    simulate(main)
    assert sum(sizes) == 256 * 3
    assert len(sizes) < 64


def test_an_aborted_answer_goes_on_while_the_call_that_it_was_of_still_ends() -> None:
    class Slow(ScriptedSampler):
        async def generate(self, prompts: Any, sampling: Any) -> AsyncGenerator[Any]:
            rows = prompts.repeat(1)
            async with self.generate_calls.begin() as call:
                await asyncio.sleep(1)
                aborted = not await call.step()
                for index in range(len(rows)):
                    yield self._row(rows.select([index]), sampling, aborted)
                await asyncio.sleep(0.5)  # as a mesh, whose stream ends after its last batch

    async def main() -> None:
        sampler = Slow(lambda prompt: "hi")
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session) as client:
            asking = [asyncio.create_task(client.completions.create(model="", prompt=each)) for each in ("1", "2", "3")]
            await asyncio.sleep(0.5)
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
        async with client_of(gateway, session) as client:
            ask = client.completions.create
            told = await asyncio.gather(*(ask(model="any", prompt="?", stop=stop) for stop in "abcd"))
        await gateway.aclose()
    assert sorted(each.choices[0].text for each in told) == ["0", "0", "1", "1"]


class SaysItsRank(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__(lambda prompt: str(current_rank().index))
