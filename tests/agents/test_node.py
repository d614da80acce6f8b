"""Agents in JavaScript, by OpenAI's own package from npm: `make test` brings it where there is npm."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from meshrl import Sampling
from meshrl.agents import Agent, AgentConfig, Gateway
from meshrl.testing import ScriptedChat, ScriptedSampler

HERE = Path(__file__).parent / "node"
PAGE = Path(__file__).parents[2] / "docs" / "agent-programs.md"
CALL = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call>'

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine"),
    pytest.mark.skipif(
        not (HERE / "node_modules/openai").exists(),
        reason="the package openai of npm is not installed: npm ci --prefix tests/agents/node",
    ),
]


def says(prompt: str) -> str:
    return "5" if CALL in prompt else CALL


async def test_the_agent_that_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```js\n(// agent\.js\n.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "agent.mjs").write_text(shown, "utf-8")
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    agent = Agent(AgentConfig(command=("node", str(tmp_path / "agent.mjs"))))
    async with Gateway(ScriptedSampler(says), ScriptedChat()).serving() as gateway:
        rows = [{"prompt": "2 + 3?", "answer": answer} for answer in ("5", "6")]
        right, wrong = await asyncio.gather(*(agent.play(gateway, row, Sampling(max_tokens=200)) for row in rows))
    assert (right.error, wrong.error) == (None, None)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert int(right.rows.loss_mask[0].sum()) == len(CALL) + len("5") + 2
    assert len(right.rows) == 1
