"""The agent of agent/quickstart: a tool spells words backward if the model calls it correctly."""

import json
from collections.abc import Mapping
from typing import Any, Final

from openai import AsyncOpenAI

REVERSE: Final[Any] = {
    "type": "function",
    "function": {
        "name": "reverse",
        "description": "Spells a word backward.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


async def solve(client: AsyncOpenAI, row: Mapping[str, object]) -> float:
    """Return 1 if the model's last answer is right."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[REVERSE])
        message: Any = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == row["answer"])
        for call in message.tool_calls:
            word = str(json.loads(call.function.arguments).get("word", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": word[::-1]})
    return 0.0
