from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


def agent(client, kind=OpenAIChatModel):
    provider = OpenAIProvider(base_url=str(client.base_url), api_key=client.api_key)
    made = Agent(kind("policy", provider=provider), instructions="Count.")

    @made.tool_plain
    def following(number: int) -> int:
        """The number that follows."""
        return number + 7

    return made


LIMITS = UsageLimits(request_limit=100)


def reward(row, said):
    return float(said.strip().endswith(row["answer"]))


def plain(client, row):
    return reward(row, agent(client).run_sync(row["prompt"], usage_limits=LIMITS).output)


async def solve(client, row):
    return reward(row, (await agent(client).run(row["prompt"], usage_limits=LIMITS)).output)


async def responses(client, row):
    made = agent(client, OpenAIResponsesModel)
    return reward(row, (await made.run(row["prompt"], usage_limits=LIMITS)).output)


async def streamed(client, row):
    async with agent(client).run_stream(row["prompt"], usage_limits=LIMITS) as result:
        return reward(row, await result.get_output())
