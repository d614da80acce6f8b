"""A sampler that dies or fails while a program waits for an answer."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from meshrl import Batch, Gather, Run, RunConfig, Sampling, endpoint, respawn
from meshrl.agents import Gateway, Session
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate

USER: Any = {"role": "user", "content": "hello"}


def client_of(gateway: Gateway, session: Session, retries: int) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
    return openai.AsyncOpenAI(base_url=session.url, api_key=session.token, max_retries=retries, http_client=http)


def test_a_call_that_fails_once_is_asked_again_by_the_client_and_recorded_once() -> None:
    class FailsOnce(ScriptedSampler):
        async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
            if not failed:
                failed.append(True)
                raise RuntimeError("device-side assert")
            async for batch in super().generate(prompts, sampling):
                yield batch

    failed: list[bool] = []

    async def main() -> None:
        gateway = Gateway(FailsOnce(["hi"]), ScriptedChat())
        session = gateway.open(Sampling(max_tokens=100))
        async with client_of(gateway, session, retries=2) as client:
            told = await client.chat.completions.create(model="policy", messages=[USER])
        assert told.choices[0].message.content == "hi"
        assert session.failure is None  # what the program raises from now on is its own
        assert gateway.close(session).objects("completion") == ("hi",)

    simulate(main)
    assert failed


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
        async with client_of(gateway, session, retries=0) as client:
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
