from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def following(number: int) -> int:
    """The number that follows."""
    return number + 7


def agent(client, kind=OpenAIChatCompletionsModel):
    own = AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key)
    settings = ModelSettings(parallel_tool_calls=False)
    model = kind(model="policy", openai_client=own)
    return Agent(name="counter", instructions="Count.", model=model, tools=[following], model_settings=settings)


def reward(row, result):
    return float(str(result.final_output).strip().endswith(row["answer"]))


def plain(client, row):
    return reward(row, Runner.run_sync(agent(client), row["prompt"], max_turns=100))


async def solve(client, row):
    return reward(row, await Runner.run(agent(client), row["prompt"], max_turns=100))


async def responses(client, row):
    return reward(row, await Runner.run(agent(client, OpenAIResponsesModel), row["prompt"], max_turns=100))


async def streamed(client, row):
    result = Runner.run_streamed(agent(client), row["prompt"], max_turns=100)
    async for _ in result.stream_events():
        pass
    return reward(row, result)
