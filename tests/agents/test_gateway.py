"""The gateway, by the real client: what agents are told, what is recorded, and what is refused."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from meshrl import SamplerConfig, Sampling, Weights
from meshrl.agents import Gateway, GatewayConfig, Session
from meshrl.testing import FakeSampler, ScriptedChat, ScriptedSampler, simulate
from meshrl.testing.scripted import reply

USER: Any = {"role": "user", "content": "hello"}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def gateway_of(script: Any, **config: Any) -> Gateway:
    return Gateway(ScriptedSampler(script), ScriptedChat(), GatewayConfig(**config))


def client_of(gateway: Gateway, session: Session) -> openai.AsyncOpenAI:
    """The real client, without a network."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
    return openai.AsyncOpenAI(base_url=session.url, api_key=session.token, max_retries=0, http_client=http)


def talk(script: Any, program: Callable[[Any, Gateway, Session], Any], **config: Any) -> Any:
    """A program against a script, in virtual time."""

    async def main() -> Any:
        gateway = gateway_of(script, **config)
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session) as client:
            found = await program(client, gateway, session)
        await gateway.aclose()
        return found

    return simulate(main)


def test_an_answer() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        told = await client.chat.completions.create(model="any", messages=[USER])
        assert told.choices[0].message.content == "hi"
        assert told.choices[0].message.role == "assistant"
        assert told.choices[0].finish_reason == "stop"
        assert told.usage is not None
        assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (len("user: hello\0\nassistant: "), 3)
        rows = gateway.close(session)
        assert rows.tokens[0].tolist() == list(map(ord, "user: hello\0\nassistant: hi\0"))
        assert rows.loss_mask[0].tolist() == [False] * 24 + [True] * 3

    talk(["hi"], program)


def test_turns_go_on_in_one_row_as_the_client_dumps_them() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        messages: list[Any] = [USER]
        for _ in range(3):
            told = await client.chat.completions.create(model="any", messages=messages)
            messages += [told.choices[0].message, USER]  # with all the keys that the client puts there
        rows = gateway.close(session)
        assert len(rows) == 1
        assert int(rows.loss_mask[0].sum()) == len("one\0two\0three\0")

    talk(["one", "two", "three"], program)


def test_a_history_with_parts() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        parts: Any = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot"}]
        history: Any = [USER, {"role": "assistant", "content": parts}, USER]
        await client.chat.completions.create(model="any", messages=history)
        assert gateway.close(session).objects("prompt") == (
            "user: hello\nassistant: I cannot\nuser: hello\nassistant: ",
        )

    talk(["hi"], program)


def test_a_stream_adds_up_to_the_answer() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        stream = await client.chat.completions.create(
            model="any", messages=[USER], n=2, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        texts: list[str] = ["", ""]
        calls: list[Any] = []
        reasons: dict[int, Any] = {}
        usage: Any = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        assert texts == ["one", ""]
        assert [(call.function.name, call.function.arguments) for call in calls if call.function] == [
            ("add", '{"a": 1}')
        ]
        assert reasons == {0: "stop", 1: "tool_calls"}
        assert usage is not None
        assert usage.completion_tokens == len("one\0") + len(CALL) + 1
        assert len(gateway.close(session)) == 2

    talk(["one", CALL], program)


def test_tools_are_called_and_answered() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        told = await client.chat.completions.create(model="any", messages=[USER], tools=TOOLS)
        (call,) = list(told.choices[0].message.tool_calls or [])
        assert told.choices[0].message.content == "I add"
        assert told.choices[0].finish_reason == "tool_calls"
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        messages: list[Any] = [USER, told.choices[0].message, result]
        told = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert told.choices[0].message.content == '{"name": "add", "arguments": 3}'
        assert len(gateway.close(session)) == 1

    talk([f"I add {CALL}", '{"name": "add", "arguments": 3}'], program)


def test_calls_as_llama_writes_them_and_tools_that_are_not_to_be_called() -> None:
    written = '{"name": "add", "parameters": {"a": 1}}'

    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        told = await client.chat.completions.create(model="any", messages=[USER], tools=TOOLS)
        assert told.choices[0].message.tool_calls
        told = await client.chat.completions.create(model="any", messages=[USER], tools=TOOLS, tool_choice="none")
        assert told.choices[0].message.content == written

    talk([written] * 2, program)


def test_stop_length_and_logprobs() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        ask = client.chat.completions.create
        told = await ask(model="any", messages=[USER], stop=["lo"], logprobs=True)
        assert told.choices[0].message.content == "hel"
        assert told.choices[0].logprobs is not None
        assert [(each.token, each.logprob) for each in told.choices[0].logprobs.content or ()] == [
            (letter, -0.5) for letter in "hello"
        ]
        told = await ask(model="any", messages=[USER], max_completion_tokens=2)
        assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("he", "length")
        rows = gateway.close(session)
        assert rows.row("truncated").tolist() == [False, True]

    talk(["hello you"] * 2, program)


def test_completions_without_messages() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        told = await client.completions.create(model="any", prompt="1 2", max_tokens=2, logprobs=0)
        assert (told.choices[0].text, told.choices[0].finish_reason) == (" 3", "length")
        assert told.choices[0].logprobs is not None
        assert (told.choices[0].logprobs.tokens, told.choices[0].logprobs.token_logprobs) == ([" ", "3"], [-0.5] * 2)
        stream = await client.completions.create(model="any", prompt="1 2 3", stream=True)
        assert [(choice.text, choice.logprobs) async for chunk in stream for choice in chunk.choices] == [(" 4", None)]
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert len(gateway.close(session)) == 1

    talk([" 3", " 4"], program)


def test_a_prompt_that_is_asked_again_after_an_empty_answer() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        first = await client.completions.create(model="any", prompt="1 2")
        again = await client.completions.create(model="any", prompt="1 2")
        assert (first.choices[0].text, again.choices[0].text) == ("", "x")
        assert first.usage is not None
        assert again.usage is not None
        assert first.usage.prompt_tokens == again.usage.prompt_tokens == len("1 2")

    talk(["", "x"], program)


def test_a_client_that_writes_what_stopped_the_answer() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        stop = ["\nObservation:"]
        told = await client.completions.create(model="any", prompt="Why?", stop=stop)
        text = f"Why?{told.choices[0].text}\nObservation: 42"
        await client.completions.create(model="any", prompt=text, stop=stop)
        rows = gateway.close(session)
        assert "".join(map(chr, rows.tokens[0].tolist())) == f"{text} it is\0"
        assert len(rows) == 1

    talk(["\nAction: ask\nObservation: 43", " it is"], program)


def test_a_fake_sampler_answers_whatever_it_is_asked_and_ends_as_others_do() -> None:
    async def main() -> None:
        sampler = FakeSampler(SamplerConfig(model="none"))
        await sampler.load(Weights(0, {"skill": np.array([1.0])}))
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session) as client:
            text = (await client.completions.create(model="any", prompt="1 2")).choices[0]
            assert (text.text, text.finish_reason) == ("1 2", "stop")
            ask = client.chat.completions.create
            look: Any = {"type": "function", "function": {"name": "look", "parameters": None}}
            calls = (await ask(model="any", messages=[USER], tools=[look])).choices[0].message.tool_calls
            assert [call.function.arguments for call in calls or () if call.type == "function"] == ["{}"]
            ends: Any = (
                ({"max_completion_tokens": 5}, "hello", "length"),
                ({"max_completion_tokens": 6}, "hello", "stop"),  # the end of a turn is a token, too
                ({"stop": ["ll"]}, "he", "stop"),
            )
            for given, content, reason in ends:
                answer = await ask(model="any", messages=[USER], **given)
                assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (content, reason)
        assert gateway.close(session).row("truncated").sum() == 1
        assert reply(ScriptedChat().render([], [])) == ""

    simulate(main)


def test_new_weights_between_turns_and_an_abort_under_the_clients_feet() -> None:
    class Aborted(ScriptedSampler):
        async def generate(self, prompts: Any, sampling: Any) -> AsyncGenerator[Any]:
            if len(self.asked) == 1 and not aborts:
                asyncio.get_running_loop().call_soon(lambda: aborts.append(asyncio.create_task(self.abort())))
                await asyncio.sleep(0)
            async for batch in super().generate(prompts, sampling):
                yield batch

    aborts: list[asyncio.Task[None]] = []

    async def main() -> list[int]:
        sampler = Aborted(["one", "two"])
        gateway = Gateway(sampler, ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        async with client_of(gateway, session) as client:
            told = await client.chat.completions.create(model="any", messages=[USER])
            await sampler.load(Weights(7, {"skill": np.zeros(1)}))
            messages: list[Any] = [USER, told.choices[0].message, USER]
            told = await client.chat.completions.create(model="any", messages=messages)
        assert told.choices[0].message.content == "two"
        return [version for version in gateway.close(session).versions[0].tolist() if version >= 0]

    assert simulate(main) == [0] * 4 + [7] * 4


def test_a_sampler_that_is_cancelled_is_told_to_who_asked() -> None:
    def cancelled(_: str) -> str:
        raise asyncio.CancelledError

    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        with pytest.raises(openai.InternalServerError, match="the sampler failed: CancelledError"):
            await client.chat.completions.create(model="any", messages=[USER])

    talk(cancelled, program)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"messages": []}, "length >= 1"),
        ({"n": 0}, "`\\$.n`"),
        ({"n": 100_000}, "`\\$.n`"),
        ({"messages": [{"role": "king", "content": ""}]}, "Invalid enum value 'king'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_requests_that_are_refused_in_words(given: Any, why: str) -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        asked: dict[str, Any] = {"model": "any", "messages": [USER], **given}
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await client.chat.completions.create(**asked)
        assert caught.value.type == "invalid_request_error"
        assert len(gateway.close(session)) == 0

    talk([], program)


def test_a_sampler_that_fails_and_a_prompt_without_room() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        with pytest.raises(openai.InternalServerError, match="the sampler failed: IndexError"):
            await client.chat.completions.create(model="any", messages=[USER])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="any", prompt="a" * (1 << 20))
        assert caught.value.code == "context_length_exceeded"

    talk([], program)


def test_a_token_opens_its_own_session_alone() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        other = gateway.open(Sampling(max_tokens=1000))
        for url, key in ((other.url, session.token), (session.url, other.token), (session.url, "é"), (session.url, "")):
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app)) as http:
                headers = {b"Authorization": f"Bearer {key}".encode()}
                got = await http.post(
                    f"{url}/chat/completions", json={"model": "", "messages": [USER]}, headers=headers
                )
                assert got.status_code == 401
                assert session.token not in got.text
        gateway.close(session)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="any", messages=[USER])

    talk(["never"], program)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"\\ud83d"', b"\xff", b"[" * 100_000, b'{"messages": 1}'])
def test_malformed_bodies(body: bytes) -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app)) as http:
            headers = {"Authorization": f"Bearer {session.token}"}
            got = await http.post(f"{session.url}/chat/completions", content=body, headers=headers)
        assert got.status_code == 400
        assert "the body is no such request" in got.json()["error"]["message"]

    talk([], program)


@asynccontextmanager
async def served(script: Any, **config: Any) -> AsyncGenerator[tuple[Gateway, Session]]:
    """Behind a real server, on a port of this machine."""
    async with gateway_of(script, **config).serving() as gateway:
        yield gateway, gateway.open(Sampling(max_tokens=1 << 24))


async def test_it_listens_on_this_machine_alone() -> None:
    async with served(["hi"]) as (_, session):
        assert session.url.startswith("http://127.0.0.1:")
        http = httpx2.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=session.url, api_key=session.token, http_client=http) as client:
            told = await client.chat.completions.create(model="any", messages=[USER])
            assert told.choices[0].message.content == "hi"
            with pytest.raises(openai.NotFoundError, match="is not served"):
                await client.embeddings.create(model="any", input="text")


async def test_a_body_that_is_too_large() -> None:
    async with served([], body_mib=1) as (_, session), httpx2.AsyncClient(trust_env=False) as http:
        headers = {"Authorization": f"Bearer {session.token}"}
        got = await http.post(f"{session.url}/completions", content=b"a" * (2 << 20), headers=headers)
        assert got.status_code == 413
        assert "1 MiB" in got.json()["error"]["message"]


async def test_a_client_that_never_reads_its_stream_is_left() -> None:
    async with served(lambda prompt: "a" * (4 << 20), timeout=0.2) as (gateway, session):
        host, port = session.url.split("/")[2].split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        body = json.dumps({"model": "", "messages": [USER], "n": 2, "stream": True}).encode()
        path = "/" + session.url.split("/", 3)[3]
        writer.write(
            f"POST {path}/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {session.token}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        while gateway._in_flight or not len(session.conversation):  # noqa: ASYNC110 -- the server tells nobody
            await asyncio.sleep(0.01)
        writer.close()
        assert len(gateway.close(session)) == 2
        del reader


@pytest.mark.parametrize(("bound", "status"), [({}, None), ({"requests": 50}, 429), ({"connections": 500}, 503)])
async def test_a_thousand_connections_lose_nothing(bound: dict[str, int], status: int | None) -> None:
    """What is answered is recorded, and what there is no room for is refused."""
    async with served(lambda prompt: prompt, **bound) as (gateway, session):
        address, _, path = session.url.removeprefix("http://").partition("/")
        host, port = address.split(":")
        open_ones = [await asyncio.open_connection(host, int(port)) for _ in range(1000)]

        async def ask(number: int) -> int:
            reader, writer = open_ones[number]
            body = json.dumps({"model": "", "prompt": f"<{number}>", "max_tokens": 20})
            head = f"Host: {address}\r\nAuthorization: Bearer {session.token}\r\nConnection: close"
            writer.write(
                f"POST /{path}/completions HTTP/1.1\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            got = (await reader.read()).decode()
            writer.close()
            found = int(got.split()[1])
            assert found != 200 or json.loads(got.partition("\r\n\r\n")[2])["choices"][0]["text"] == f"<{number}>"
            return found

        found = await asyncio.gather(*map(ask, range(1000)))
        assert set(found) <= {200, status}
        assert (found.count(200) == 1000) == (status is None)
        assert len(gateway.close(session)) == found.count(200)
