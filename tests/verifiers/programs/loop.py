"""A harness that is a loop in the environment's process: it asks the model, and calls the tools that it wants."""

import asyncio
import json
import os
import threading
from contextlib import AsyncExitStack

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import mcp_client

__all__ = ["LoopHarness"]


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [each.model_dump(exclude_none=True, include={"role", "content"}) for each in prompt]
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            servers = [await stack.enter_async_context(mcp_client({"url": url})) for url in mcp_urls.values()]
            owners = {tool.name: (server, tool) for server in servers for tool in (await server.list_tools()).tools}
            tools = [
                {"type": "function", "function": {"name": name, "parameters": tool.input_schema}}
                for name, (_, tool) in owners.items()
            ]
            while True:
                told = await http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})},
                )
                told.raise_for_status()
                message = told.json()["choices"][0]["message"]
                if message.get("content") == "end":
                    os._exit(1)
                if message.get("content") == "block":
                    threading.Event().wait()
                if message.get("content") == "hang":
                    await asyncio.Event().wait()
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    server, _ = owners[call["function"]["name"]]
                    result = await server.call_tool(call["function"]["name"], json.loads(call["function"]["arguments"]))
                    text = "".join(part.text for part in result.content if part.type == "text")
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
