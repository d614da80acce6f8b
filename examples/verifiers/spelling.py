"""An environment of verifiers that needs its tool: the tool spells a word backward, and the model repeats the result.

Its harness is a loop in the environment's own process, so an episode starts no program.
"""

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cached_property
from random import Random
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["SpellingHarness", "SpellingTaskset"]


class SpellingTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def reverse(self, word: str) -> str:
        """Spells a word backward."""
        return word[::-1]


class SpellingData(vf.TaskData):
    answer: str


class SpellingTask(vf.Task[SpellingData]):
    @vf.reward
    async def spelled(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class SpellingConfig(vf.TasksetConfig):
    words: int = 4000
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SpellingTaskset(vf.Taskset[SpellingTask, SpellingConfig]):
    """Words to spell backward."""

    @classmethod
    def toolsets(cls, config: SpellingConfig) -> list[vf.Toolset]:
        return [SpellingTools(config.tools)]

    def load(self) -> Iterator[SpellingTask]:
        """Yield words of three to five letters, always the same."""
        letters, words = Random(0), dict[str, None]()
        while len(words) < self.config.words:
            word = "".join(letters.choice(["aeiou", "bcdfghklmnprstvz"][at % 2]) for at in range(6))
            first = letters.randrange(2)
            words[word[first : first + letters.randint(3, 5)]] = None
        for word in words:
            yield SpellingTask(SpellingData(prompt=word, answer=word[::-1]), self.config.task)


class SpellingHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, and calls the tools that it wants, three times at most."""

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        (url,) = mcp_urls.values()
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with AsyncExitStack() as stack:
            tools, owners, servers = await connect_mcp({"mcpServers": {"": {"url": url}}}, stack)
            for _ in range(3):
                told = await self._http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, "tools": tools},
                )
                told.raise_for_status()
                message = told.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    text = await call_mcp(servers, owners, name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    SpellingTools.run()
