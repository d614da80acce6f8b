"""`/v1/responses`, by the real client: the same conversation in another form."""

from typing import Any

import openai
import pytest

from tests.agents.talks import USER, Talk, opened, talking

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@talking(["hi", "long"])
async def test_a_text_and_instructions(talk: Talk) -> None:
    told = await talk.client.responses.create(model="any", instructions="be kind", input="hello")
    assert (told.output_text, told.status) == ("hi", "completed")
    assert told.usage is not None
    assert told.usage.output_tokens == len("hi\0")
    short = await talk.client.responses.create(model="any", input="hello", max_output_tokens=2)
    assert (short.output_text, short.status) == ("lo", "incomplete")
    rows = talk.rows()
    assert rows.objects("prompt") == ("system: be kind\nuser: hello\nassistant: ", "user: hello\nassistant: ")


@talking([f"I add{CALL}", "two", CALL, "two", f"I add{CALL}", "two", CALL, "two"])
async def test_calls_of_tools_go_on_in_one_row(talk: Talk) -> None:
    async def asked(client: openai.AsyncOpenAI, given: Any, streamed: bool) -> Any:
        if not streamed:
            return await client.responses.create(model="any", input=given, tools=[TOOL])
        async with client.responses.stream(model="any", input=given, tools=[TOOL]) as stream:
            return await stream.get_final_response()

    for streamed, before in ((False, "I add"), (False, ""), (True, "I add"), (True, "")):
        async with opened(talk.gateway) as own:
            given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]}]
            told = await asked(own.client, given, streamed)
            assert told.output_text == before
            (call,) = [item for item in told.output if item.type == "function_call"]
            assert (call.name, call.arguments) == ("add", '{"a": 1}')
            given += [*told.output, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
            assert (await asked(own.client, given, streamed)).output_text == "two"
            assert [int(mask.sum()) for mask in own.rows().loss_mask] == [len(f"{before}{CALL}\0two\0")]


@talking(["one", "two"])
async def test_a_conversation_goes_on_in_either_form(talk: Talk) -> None:
    told = await talk.client.responses.create(model="any", input="hello")
    again = await talk.ask([USER, {"role": "assistant", "content": told.output_text}, USER])
    assert again.choices[0].message.content == "two"
    assert len(talk.rows()) == 1


@talking([])
async def test_requests_that_are_refused_in_words(talk: Talk) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "give the whole conversation"),
        ({"input": [image]}, "type 'input_image'"),
        ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "an item of type 'reasoning'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not served"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": []}, "there are no messages"),
    ]
    for given, why in cases:
        request: dict[str, Any] = {"model": "any", "input": "hello", **given}
        with pytest.raises(openai.BadRequestError, match=why):
            await talk.client.responses.create(**request)
