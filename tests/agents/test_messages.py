"""Anthropic's protocol, by its bytes: `tests/clients` has the real client."""

import base64
import json
from typing import Any

import httpx2
import msgspec
import pytest

from meshrl.agents.messages import MessagesRequest
from meshrl.tasks import decoded_url
from tests.agents.talks import Talk, opened, talking

TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nhm,  so\n</think>\n\n"
USER: Any = {"role": "user", "content": "1 + 1?"}


async def post(talk: Talk, path: str = "messages", **body: Any) -> httpx2.Response:
    """A request as the client sends it, with its key in the header of its own."""
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=talk.gateway.app)) as http:
        whole = {"model": "any", "max_tokens": 500, "messages": [USER], **body}
        headers = {"x-api-key": talk.session.token, "anthropic-version": "2023-06-01"}
        return await http.post(f"{talk.session.root}/v1/{path}", json=whole, headers=headers)


def streamed(text: str) -> tuple[list[str], Any]:
    """The names of the events, and the message that they add up to."""
    lines = [event.split("\n") for event in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name.removeprefix("event: ") for name, _ in lines] == [event["type"] for event in events]
    message, parts = events[0]["message"], {"thinking_delta": "thinking", "text_delta": "text"}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        if (delta := event.get("delta")) and "index" in event:
            block = message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                block[parts[delta["type"]]] += delta[parts[delta["type"]]]
        if event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return [event["type"] for event in events], message


@talking([f"{THOUGHT}I add.\n{CALL}", "two"] * 2)
async def test_turns_of_thoughts_and_tools_are_one_row_whole_or_streamed(talk: Talk) -> None:
    for is_streamed in (False, True):
        async with opened(talk.gateway) as own:
            asked: Any = {"tools": [TOOL], "system": [{"type": "text", "text": "Be kind."}], "stream": is_streamed}
            told = await post(own, **asked)
            names, message = streamed(told.text) if is_streamed else ([], told.json())
            thinking, text, call = message["content"]
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm,  so")
            assert text == {"type": "text", "text": "I add."}
            assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
            assert (message["stop_reason"], message["role"], message["type"]) == ("tool_use", "assistant", "message")
            drawn = len(f"{THOUGHT}I add.\n{CALL}") + 1
            assert message["usage"]["output_tokens"] == drawn
            if is_streamed:
                block = ["content_block_start", "content_block_delta", "content_block_stop"]
                signed = [*block[:2], "content_block_delta", block[2]]
                assert names == ["message_start", *signed, *block, *block, "message_delta", "message_stop"]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "2"}]}
            history = [
                USER,
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": [result]},
            ]
            counted = await post(own, "messages/count_tokens", messages=history, **asked)
            asked["stream"] = False
            last = (await post(own, messages=history, **asked)).json()
            assert last["content"] == [{"type": "text", "text": "two"}]
            assert last["stop_reason"] == "end_turn"
            assert counted.json() == {"input_tokens": last["usage"]["input_tokens"]}
            rows = own.rows()
            assert [int(mask.sum()) for mask in rows.loss_mask] == [drawn + len("two\0")]
            prompt = "system: Be kind.\nuser: 1 + 1?\nassistant: "
            assert str(rows.objects("prompt")[0]).endswith(prompt)
            assert str(rows.objects("completion")[0]).endswith("tool: 2\nassistant: two")


@talking(["a", "hello you", "hello"])
async def test_results_and_texts_of_one_message_and_why_an_answer_ended(talk: Talk) -> None:
    parts = [
        {"type": "tool_result", "tool_use_id": "a", "content": "2"},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
    ]
    calls: list[object] = [{"type": "tool_use", "id": name, "name": "add", "input": {}} for name in ("a", "b")]
    messages = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": parts}]
    await post(talk, messages=messages)
    assert talk.sampler.asked[0].endswith("tool: 2\0\ntool: \0\nuser: one\n\ntwo\0\nassistant: ")
    stopped = (await post(talk, stop_sequences=["you", "lo"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"][0]["text"] == "hel"
    cut = (await post(talk, max_tokens=3)).json()
    assert (cut["stop_reason"], cut["stop_sequence"], cut["content"][0]["text"]) == ("max_tokens", None, "hel")


@talking([])
async def test_requests_that_are_refused_in_the_protocols_form(talk: Talk) -> None:
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": []}, "length >= 1"),
        ({"max_tokens": 0}, "`$.max_tokens`"),
        ({"messages": [image]}, "with a source of type"),
        ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "end with a message of the user"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search' of type"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": "a" * (1 << 20)}]}, "prompt is too long"),
    ]
    for given, why in cases:
        got = await post(talk, **given)
        assert (got.status_code, got.json()["type"]) == (400, "error")
        assert got.json()["error"]["type"] == "invalid_request_error"
        assert why in got.json()["error"]["message"]
    assert (await post(talk, "messages/batches")).json()["error"]["type"] == "not_found_error"
    talk.gateway.close(talk.session)
    unknown = await post(talk)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")


def test_an_image_is_decoded_from_base64_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[str]()

    def told(url: str, where: str) -> bytes:
        decoded.append(url)
        return decoded_url(url, where)

    monkeypatch.setattr("meshrl.agents.messages.decoded_url", told)
    image = {"type": "image", "source": {"type": "base64", "data": base64.b64encode(b"pixels").decode()}}
    body = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
    asked = msgspec.convert(body, MessagesRequest).read()
    assert ([*asked.images.values()], len(decoded)) == ([b"pixels"], 1)
