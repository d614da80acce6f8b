import anthropic

FOLLOWING = {
    "name": "following",
    "description": "The number that follows.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}},
}


def place(client):
    return {"base_url": str(client.base_url).removesuffix("/v1/"), "api_key": client.api_key}


def call(messages):
    return {"model": "policy", "max_tokens": 4000, "system": "Count.", "messages": messages, "tools": [FOLLOWING]}


def begin(row):
    return [{"role": "user", "content": row["prompt"]}]


def reward(row, messages, message):
    """None if the model called a tool, whose answers are added."""
    messages.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": each.id, "content": str(each.input["number"] + 7)}
        for each in message.content
        if each.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
    return None if results else float(message.content[-1].text.endswith(row["answer"]))


def plain(client, row):
    messages, result = begin(row), None
    with anthropic.Anthropic(**place(client)) as model:
        while result is None:
            result = reward(row, messages, model.messages.create(**call(messages)))
    return result


async def solve(client, row):
    messages, result = begin(row), None
    async with anthropic.AsyncAnthropic(**place(client)) as model:
        while result is None:
            counted = await model.messages.count_tokens(
                **{k: v for k, v in call(messages).items() if k != "max_tokens"}
            )
            message = await model.messages.create(**call(messages))
            assert message.usage.input_tokens == counted.input_tokens
            result = reward(row, messages, message)
    return result


def streamed(client, row):
    messages, result = begin(row), None
    with anthropic.Anthropic(**place(client)) as model:
        while result is None:
            with model.messages.stream(**call(messages)) as stream:
                result = reward(row, messages, stream.get_final_message())
    return result
