"""The gateway, by the real client: what agents are told in either form, what is recorded, and what is refused."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from tests.agents.talks import SAMPLING, USER, Talk, opened, talking

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMAS = '{"name": "add", "parameters": {"a": 1}}'


@talking(["hi"])
async def test_an_answer(talk: Talk) -> None:
    told = await talk.ask()
    said = told.choices[0].message
    assert (said.content, said.role, told.choices[0].finish_reason) == ("hi", "assistant", "stop")
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (len("user: hello\0\nassistant: "), 3)
    rows = talk.rows()
    assert rows.tokens[0].tolist() == list(map(ord, "user: hello\0\nassistant: hi\0"))
    assert rows.loss_mask[0].tolist() == [False] * 24 + [True] * 3


@talking(["one", "two", "three", "four"])
async def test_turns_go_on_in_one_row_as_the_client_dumps_them(talk: Talk) -> None:
    messages: list[Any] = [USER]
    for _ in range(3):
        told = await talk.ask(messages)
        messages += [told.choices[0].message, USER]  # with all the keys that the client puts there
    parts: Any = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot"}]
    await talk.ask([USER, {"role": "assistant", "content": parts}, USER])
    rows = talk.rows()
    assert [int(mask.sum()) for mask in rows.loss_mask] == [len("one\0two\0three\0"), len("four\0")]
    assert rows.objects("prompt")[1] == "user: hello\nassistant: I cannot\nuser: hello\nassistant: "


@talking(["one", CALL])
async def test_a_stream_adds_up_to_the_answer(talk: Talk) -> None:
    stream = await talk.ask(n=2, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = ["".join(each.delta.content or "" for each in choices if each.index == index) for index in (0, 1)]
    assert texts == ["one", ""]
    functions = [call.function for each in choices for call in each.delta.tool_calls or [] if call.function]
    assert [(function.name, function.arguments) for function in functions] == [("add", '{"a": 1}')]
    reasons = {each.index: each.finish_reason for each in choices if each.finish_reason}
    assert reasons == {0: "stop", 1: "tool_calls"}
    assert chunks[-1].usage.completion_tokens == len("one\0") + len(CALL) + 1
    assert len(talk.rows()) == 2


@talking([f"I add {CALL}", '{"name": "add", "arguments": 3}', LLAMAS, LLAMAS])
async def test_tools_are_called_and_answered(talk: Talk) -> None:
    told = await talk.ask(tools=TOOLS)
    (call,) = told.choices[0].message.tool_calls
    assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("I add", "tool_calls")
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    told = await talk.ask([USER, told.choices[0].message, result], tools=TOOLS)
    assert told.choices[0].message.content == '{"name": "add", "arguments": 3}'  # no call: these are no arguments
    assert len(talk.rows()) == 1
    async with opened(talk.gateway) as other:
        assert (await other.ask(tools=TOOLS)).choices[0].message.tool_calls
        assert (await other.ask(tools=TOOLS, tool_choice="none")).choices[0].message.content == LLAMAS


@talking(["hello you", "hello", "hello"])
async def test_stop_length_and_logprobs(talk: Talk) -> None:
    told = await talk.ask(stop=["lo"], logprobs=True)
    assert told.choices[0].message.content == "hel"
    logprobs = [(each.token, each.logprob) for each in told.choices[0].logprobs.content]
    assert logprobs == [(letter, -0.5) for letter in "hello"]
    for most, reason in ((5, "length"), (6, "stop")):  # the end of a turn is a token, too
        told = await talk.ask(max_completion_tokens=most)
        assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("hello", reason)
    assert talk.rows().row("truncated").tolist() == [False, True, False]


@talking([" 3", " 4"])
async def test_completions_without_messages(talk: Talk) -> None:
    (told,) = (await talk.complete("1 2", max_tokens=2, logprobs=0)).choices
    assert (told.text, told.finish_reason) == (" 3", "length")
    assert (told.logprobs.tokens, told.logprobs.token_logprobs) == ([" ", "3"], [-0.5] * 2)
    stream = await talk.complete("1 2 3", stream=True)
    assert [(choice.text, choice.logprobs) async for chunk in stream for choice in chunk.choices] == [(" 4", None)]
    assert [model.id async for model in talk.client.models.list()] == ["policy"]
    assert len(talk.rows()) == 1


def fails(prompt: str) -> str:
    raise asyncio.CancelledError if prompt == "cancelled" else IndexError


@talking(fails)
async def test_a_sampler_that_fails_or_is_cancelled_and_a_prompt_without_room(talk: Talk) -> None:
    with pytest.raises(openai.InternalServerError, match="the sampler failed: CancelledError"):
        await talk.complete("cancelled")
    with pytest.raises(openai.InternalServerError, match="the sampler failed: IndexError"):
        await talk.ask()
    with pytest.raises(openai.BadRequestError) as caught:
        await talk.complete("a" * (1 << 20))
    assert caught.value.code == "context_length_exceeded"


@talking([])
async def test_requests_that_are_refused_in_words(talk: Talk) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": []}, r"length >= 1"),
        ({"n": 0}, r"`\$.n`"),
        ({"n": 100_000}, r"`\$.n`"),
        ({"messages": [{"role": "king", "content": ""}]}, r"Invalid enum value 'king'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"type 'image_url'"),
        ({"tool_choice": "required", "tools": TOOLS}, r"tool_choice"),
        ({"response_format": {"type": "json_object"}}, r"response_format"),
        ({"logprobs": True, "top_logprobs": 3}, r"top_logprobs"),
    ]
    for given, why in cases:
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await talk.ask(**given)
        assert caught.value.type == "invalid_request_error"
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=talk.gateway.app)) as http:
        headers = {"Authorization": f"Bearer {talk.session.token}"}
        for body in (b"", b"{", b"[]", b'"\\ud83d"', b"\xff", b"[" * 100_000, b'{"messages": 1}'):
            got = await http.post(f"{talk.session.url}/chat/completions", content=body, headers=headers)
            assert (got.status_code, body) == (400, body)
            assert "the body is no such request" in got.json()["error"]["message"]
    assert len(talk.rows()) == 0


@talking(["never"])
async def test_a_token_opens_its_own_session_alone(talk: Talk) -> None:
    mine, other = talk.session, talk.gateway.open(SAMPLING)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=talk.gateway.app)) as http:
        for url, key in ((other.url, mine.token), (mine.url, other.token), (mine.url, "é"), (mine.url, "")):
            headers, body = {b"Authorization": f"Bearer {key}".encode()}, {"model": "", "messages": [USER]}
            got = await http.post(f"{url}/chat/completions", json=body, headers=headers)
            assert got.status_code == 401
            assert mine.token not in got.text
    talk.rows()
    with pytest.raises(openai.AuthenticationError):
        await talk.ask()


TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
ADDS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


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


@talking([f"I add{ADDS}", "two", ADDS, "two", f"I add{ADDS}", "two", ADDS, "two"])
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
            assert [int(mask.sum()) for mask in own.rows().loss_mask] == [len(f"{before}{ADDS}\0two\0")]


@talking(["one", "two"])
async def test_a_conversation_goes_on_in_either_form(talk: Talk) -> None:
    told = await talk.client.responses.create(model="any", input="hello")
    again = await talk.ask([USER, {"role": "assistant", "content": told.output_text}, USER])
    assert again.choices[0].message.content == "two"
    assert len(talk.rows()) == 1


@talking([])
async def test_requests_in_the_other_form_that_are_refused_in_words(talk: Talk) -> None:
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
