import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}


async def following(number: int) -> int:
    """The number that follows."""
    return number + 7


async def solve(client, row, **more):
    model = OpenAIChatCompletionClient(
        model="policy", base_url=str(client.base_url), api_key=client.api_key, model_info=INFO
    )
    agent = AssistantAgent(
        "counter", model, tools=[following], system_message="Count.", max_tool_iterations=100, **more
    )
    result = await agent.run(task=row["prompt"])
    return float(result.messages[-1].content.strip().endswith(row["answer"]))


async def streamed(client, row):
    return await solve(client, row, model_client_stream=True)


def plain(client, row):
    return asyncio.run(solve(client, row))
