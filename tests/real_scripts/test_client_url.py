"""Frameworks take a URL and a key, whichever kind of function they run in, and keep their connections."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from meshrl import Sampling
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, GatewayConfig
from meshrl.testing import ScriptedChat, ScriptedSampler

SOLVE = """
import httpx2

BODY = {"model": "any", "messages": [{"role": "user", "content": "?"}]}

async def solve(client, row):
    async with httpx2.AsyncClient(trust_env=False) as http:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        told = await http.post(f"{client.base_url}chat/completions", json=BODY, headers=headers)
    again = await client.chat.completions.create(**BODY)
    return float([told.json()["choices"][0]["message"]["content"], again.choices[0].message.content] == row["answer"])
"""


async def test_the_url_of_an_async_functions_client_is_served(tmp_path: Path) -> None:
    file = tmp_path / "framework.py"
    file.write_text(SOLVE, "utf-8")
    sampler, agent = ScriptedSampler(["a", "b"]), Agent(AgentConfig(source=f"{file}:solve"))
    gateway = Gateway(sampler, ScriptedChat())
    async with Agents(sampler, agent, gateway).serving():
        episode = await agent.play(gateway, {"answer": ["a", "b"]}, Sampling(max_tokens=10))
    assert (episode.error, episode.reward, len(episode.rows)) == (None, 1.0, 2)


async def test_an_idle_connection_lives_as_long_as_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    clock = loop.time
    config = GatewayConfig(timeout=60)
    async with Gateway(ScriptedSampler([]), ScriptedChat(), config).serving() as gateway:
        url = httpx2.URL(gateway.open(Sampling()).url)
        reader, writer = await asyncio.open_connection(url.host, url.port)

        async def answered() -> Any:
            writer.write(b"GET /s/x/v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(each for each in head.split(b"\r\n") if each.lower().startswith(b"content-length"))
            return await reader.readexactly(int(length.split(b":")[1]))

        await answered()
        monkeypatch.setattr(loop, "time", lambda: clock() + 55)  # as if so many seconds had passed
        await asyncio.sleep(0)
        assert await answered()
        monkeypatch.setattr(loop, "time", lambda: clock() + 55 + 61)
        assert await reader.read() == b""
        writer.close()
