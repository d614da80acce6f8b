"""The gateway, by the real client: what agents are told, what is recorded, and what is refused."""

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
