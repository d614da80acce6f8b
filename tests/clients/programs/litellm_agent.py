import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no list of prices from the network

import litellm

FOLLOWING = {
    "type": "function",
    "function": {
        "name": "following",
        "description": "The number that follows.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}


def call(client, messages, **more):
    place = {"api_base": str(client.base_url), "api_key": client.api_key}
    return {"model": "openai/policy", "messages": messages, "tools": [FOLLOWING], **place, **more}


def begin(row):
    return [{"role": "system", "content": "Count."}, {"role": "user", "content": row["prompt"]}]


def reward(row, messages, message):
    """None if the model called a tool, whose answers are added."""
    messages.append(message)
    for each in message.tool_calls or ():
        number = json.loads(each.function.arguments)["number"]
        messages.append({"role": "tool", "tool_call_id": each.id, "content": str(number + 7)})
    return None if message.tool_calls else float(message.content.strip().endswith(row["answer"]))


def plain(client, row):
    messages, result = begin(row), None
    while result is None:
        result = reward(row, messages, litellm.completion(**call(client, messages)).choices[0].message)
    return result


async def solve(client, row):
    messages, result = begin(row), None
    while result is None:
        result = reward(row, messages, (await litellm.acompletion(**call(client, messages))).choices[0].message)
    return result


def streamed(client, row):
    messages, result = begin(row), None
    while result is None:
        pieces = list(litellm.completion(**call(client, messages, stream=True)))
        result = reward(row, messages, litellm.stream_chunk_builder(pieces).choices[0].message)
    return result
