"""Tools of real MCP servers, which the model calls without a program."""

import asyncio
import json
import math
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshrl import Sampling
from meshrl.agents import Agent, AgentConfig, Episode, Gateway
from meshrl.errors import ConfigError
from meshrl.testing import ScriptedSampler
from tests.agents.talks import PAIR, ChatML

pytest.importorskip("mcp", reason="mcp is in the environment of the frameworks: `make test-clients`")

SERVER = Path(__file__).parent / "programs/mcp_server.py"
STDIO = f"mcp:{sys.executable} {SERVER}"
JUDGE = """
def judge(transcripts, row, result):
    return float(result is not None)
"""


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(tmp_path: Path, tools: Sequence[str], said: Sequence[str], **config: Any) -> tuple[Episode, list[str]]:
    (tmp_path / "judge.py").write_text(JUDGE, "utf-8")
    sampler = ScriptedSampler(said)
    agent = Agent(AgentConfig(tools=tuple(tools), reward=f"{tmp_path / 'judge.py'}:judge", **config))
    async with Gateway(sampler, ChatML()).serving() as gateway:
        episode = await agent.play(gateway, {"prompt": "Begin at 1."}, Sampling(max_tokens=4000))
    return episode, sampler.asked


async def test_tools_of_a_process_by_stdio(tmp_path: Path) -> None:
    said = [
        called("following", number=1),
        called("counted"),
        called("counted"),
        called("lacks"),
        called("following"),
        "8",
    ]
    episode, asked = await played(tmp_path, [STDIO], said, tool_output=90)
    assert (episode.error, episode.reward, episode.turns, len(episode.rows)) == (None, 1.0, 6, 1)
    results = asked[-1].replace(PAIR, "th").split("<tool>\n")[1:]
    assert [each.split("\0")[0] for each in results[:4]] == [
        "8",
        f"1. {'x' * 87}\n[13 characters more]",
        f"2. {'x' * 87}\n[13 characters more]",
        "Error: there is no tool 'lacks'; there are following, counted, hangs, dies",
    ]
    assert "number" in results[4]  # which argument is missing
    assert "How often" in asked[0]
    episode, asked = await played(tmp_path, [STDIO], [called("counted"), "8"])
    assert "1. x" in asked[-1]  # another process


async def test_a_call_that_hangs_and_a_model_that_never_stops(tmp_path: Path) -> None:
    episode, asked = await played(tmp_path, [STDIO], [called("hangs")] * 2, tool_timeout=0.5, turns=2)
    assert (episode.error, episode.reward, episode.turns) == (None, 0.0, 2)
    assert "Error: " in asked[-1].split("<tool>\n")[1]


async def test_a_server_that_ends_during_a_call_discards_the_episode(tmp_path: Path) -> None:
    episode, _ = await played(tmp_path, [STDIO], [called("dies"), "8"], errors="zero")
    assert str(episode.error).startswith("Discard: the server of the tool 'dies' is gone: MCPError")
    assert math.isnan(episode.reward)


async def test_tools_by_http_and_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"mcp:http://127.0.0.1:{port}/mcp"
    episode, _ = await played(tmp_path, [url], ["8"])
    assert str(episode.error).startswith(f"Discard: the tools of {url} cannot be had")
    process = await asyncio.create_subprocess_exec(sys.executable, str(SERVER), str(port))
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        writer.close()
        episode, asked = await played(tmp_path, [url], [called("following", number=1), "8"])
        assert (episode.error, episode.reward) == (None, 1.0)
        assert "<tool>\n8\0" in asked[-1]
    finally:
        process.terminate()
        await process.wait()


def test_servers_that_are_refused_before_a_run() -> None:
    for tools, why in (
        ("http://127.0.0.1/mcp", "is no server"),
        ("mcp:no-such-program", "no program 'no-such-program'"),
    ):
        with pytest.raises(ConfigError, match=why):
            Agent(AgentConfig(tools=(tools,), reward="math:sqrt"))
    with pytest.raises(ValueError, match="name the function that judges"):
        AgentConfig(tools=(STDIO,))
