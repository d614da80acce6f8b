from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def following(number: int) -> int:
    """The number that follows."""
    return number + 7


def graph(client, **more):
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key, **more)
    return create_react_agent(model, [following], prompt="Count.", name="counter")


def asked(row):
    return {"messages": [("user", row["prompt"])]}, {"recursion_limit": 100}


def reward(row, result):
    return float(result["messages"][-1].text.strip().endswith(row["answer"]))


def plain(client, row):
    return reward(row, graph(client).invoke(*asked(row)))


def streamed(client, row):
    return reward(row, graph(client, streaming=True).invoke(*asked(row)))


async def solve(client, row):
    return reward(row, await graph(client).ainvoke(*asked(row)))


async def responses(client, row):
    return reward(row, await graph(client, use_responses_api=True).ainvoke(*asked(row)))
