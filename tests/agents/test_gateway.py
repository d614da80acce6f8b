"""The gateway, by the real client: what agents are told, who waits for whom, and what is refused or given up."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from meshrl import Batch, Run, RunConfig, Sampling
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, GatewayConfig, Message, Session, Tool
from meshrl.errors import ConfigError, ModelError
from meshrl.mesh import current_rank
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate
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


@talking(["<think>hm</think>one", CALL])
async def test_a_stream_adds_up_to_the_answer(talk: Talk) -> None:
    stream = await talk.ask(n=2, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = [[each.delta.content for each in choices if each.index == index and each.delta.content] for index in (0, 1)]
    assert texts == [["<think>", "hm", "</think>", "one"], []]
    assert [each.index for each in choices if each.delta.role == "assistant"] == [0, 1]
    functions = [call.function for each in choices for call in each.delta.tool_calls or [] if call.function]
    assert [(function.name, function.arguments) for function in functions] == [("add", '{"a": 1}')]
    reasons = {each.index: each.finish_reason for each in choices if each.finish_reason}
    assert reasons == {0: "stop", 1: "tool_calls"}
    assert chunks[-1].usage.completion_tokens == len("<think>hm</think>one\0") + len(CALL) + 1
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
    assert (told.text, told.finish_reason, told.logprobs.tokens) == (" 3", "length", [" ", "3"])
    assert told.logprobs.token_logprobs == [-0.5] * 2
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


class _Mute(ScriptedChat):
    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        raise ModelError("the model has no chat template")


async def test_a_model_that_cannot_be_asked_is_told() -> None:
    async with opened(Gateway(ScriptedSampler([]), _Mute())) as talk:
        with pytest.raises(openai.InternalServerError, match="the model has no chat template"):
            await talk.ask()


@talking([])
async def test_requests_that_are_refused_in_words(talk: Talk) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": []}, r"length >= 1"),
        ({"n": 0}, r"`\$.n`"),
        ({"n": 100_000}, r"`\$.n`"),
        ({"messages": [{"role": "king", "content": ""}]}, r"Invalid enum value 'king'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "has the image None: .* data URL"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, r"type 'video_url'"),
        ({"tool_choice": "required", "tools": TOOLS}, "the backend 'fake' cannot"),
        ({"response_format": {"type": "json_object"}}, "the backend 'fake' cannot"),
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
    told: Any = await talk.client.responses.create(model="any", instructions="be kind", input="hello")
    assert (told.output_text, told.status, told.usage.output_tokens) == ("hi", "completed", len("hi\0"))
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


@talking([])
async def test_requests_in_the_other_form_that_are_refused_in_words(talk: Talk) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "give the whole conversation"),
        ({"input": [image]}, "has the image 'a': .* data URL"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "an item of type 'web_search_call'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not served"),
        ({"tools": [TOOL], "tool_choice": "required"}, "the backend 'fake' cannot"),
        ({"text": {"format": {"type": "json_object"}}}, "the backend 'fake' cannot"),
        ({"input": []}, "there are no messages"),
    ]
    for given, why in cases:
        request: dict[str, Any] = {"model": "any", "input": "hello", **given}
        with pytest.raises(openai.BadRequestError, match=why):
            await talk.client.responses.create(**request)


class Timed(ScriptedSampler):
    """Takes as many seconds for a row as its prompt says, and tells which rows each call had and which calls ended."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f" {prompt} s")
        self.calls: list[list[str]] = []
        self.given_up: list[list[str]] = []

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        asked = ["".join(map(chr, tokens.tolist())) for tokens in prompts.tokens]
        self.calls.append(asked)
        begun = asyncio.get_running_loop().time()
        try:
            for index, seconds in sorted(enumerate(map(float, asked)), key=lambda each: each[1]):
                await asyncio.sleep(begun + seconds - asyncio.get_running_loop().time())
                async for batch in super().generate(prompts.select([index]), sampling):
                    yield batch
        except asyncio.CancelledError:
            self.given_up.append(asked)
            raise


@talking(Timed)
async def test_a_short_answer_waits_for_no_long_ones(talk: Talk) -> None:
    long: list[asyncio.Task[object]] = []
    for number in range(8):
        long.append(asyncio.create_task(talk.complete("3600", stop=f"<{number // 2}>")))
        await asyncio.sleep(1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(talk.complete("1") for _ in range(3)))
    assert loop.time() - began < 1.1  # in virtual time
    assert talk.sampler.calls[-1] == ["1"] * 3
    await asyncio.gather(*long)


@talking(Timed)
async def test_what_a_closed_session_waits_for_is_given_up(talk: Talk) -> None:
    running = asyncio.create_task(talk.complete("3600", n=2))
    await asyncio.sleep(1)
    waiting = asyncio.create_task(talk.complete("1800"))
    while len(talk.session.draws) < 2:  # noqa: ASYNC110 -- no time passes
        await asyncio.sleep(0)
    talk.rows()
    for asked in (running, waiting):
        with pytest.raises(openai.APIStatusError):
            await asked
    assert asyncio.get_running_loop().time() < 2
    await asyncio.sleep(1)
    assert talk.sampler.calls == talk.sampler.given_up == [["3600"] * 2]
    assert talk.session.failure is None


@talking(Timed)
async def test_sessions_share_a_call_that_goes_on_for_those_that_are_left(talk: Talk) -> None:
    async with opened(talk.gateway) as other:
        gone, kept = asyncio.create_task(other.complete("3600")), asyncio.create_task(talk.complete("60"))
        await asyncio.sleep(1)
        other.rows()
        assert (await kept).choices[0].text == " 60 s"
        with pytest.raises(openai.APIStatusError):
            await gone
    assert talk.sampler.calls == talk.sampler.given_up == [["3600", "60"]]


async def test_what_a_client_that_has_gone_asked_for_is_given_up() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Endless(ScriptedSampler):
        async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            yield prompts

    async with Gateway(Endless([]), ScriptedChat()).serving() as gateway:
        session = gateway.open(SAMPLING)
        async with httpx2.AsyncClient(trust_env=False) as http:
            body, headers = {"model": "any", "prompt": "1"}, {"Authorization": f"Bearer {session.token}"}
            asked = asyncio.create_task(http.post(f"{session.url}/completions", json=body, headers=headers))
            await begun.wait()
            asked.cancel()
            await ended.wait()
        assert session.failure is None


class SaysItsRank(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__(lambda prompt: str(current_rank().index))


async def test_rows_that_come_one_at_a_time_go_to_all_ranks(tmp_path: Path) -> None:
    async with Run(RunConfig(name="ranks", folder=str(tmp_path), log=[])) as run:
        gateway = Gateway(await (await run.mesh(2)).spawn(SaysItsRank), ScriptedChat())
        async with opened(gateway) as talk:
            gateway.pause()  # until all are there: a call for each
            asking = [asyncio.create_task(talk.complete("?", stop=stop)) for stop in "abcd"]
            while len(talk.session.draws) < 4:  # noqa: ASYNC110 -- the gateway tells nobody
                await asyncio.sleep(0.01)
            gateway.resume()
            told = await asyncio.gather(*asking)
        await gateway.aclose()
    assert sorted(each.choices[0].text for each in told) == ["0", "0", "1", "1"]


@asynccontextmanager
async def served(sampler: ScriptedSampler | None = None, **config: Any) -> AsyncGenerator[tuple[Gateway, Session]]:
    sampler = sampler or ScriptedSampler(lambda prompt: "hi")
    async with Gateway(sampler, ScriptedChat(), GatewayConfig(**config)).serving() as gateway:
        yield gateway, gateway.open(Sampling(max_tokens=1 << 24))


def network_client_of(session: Session, retries: int = 0) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=session.url, api_key=session.token, max_retries=retries, http_client=http)


async def connect(session: Session) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = session.url.split("/")[2].split(":")
    return await asyncio.open_connection(host, int(port))


def request(session: Session, path: str, **asked: Any) -> bytes:
    address, _, root = session.url.removeprefix("http://").partition("/")
    body = json.dumps(asked)
    head = f"Host: {address}\r\nAuthorization: Bearer {session.token}\r\nConnection: close"
    return f"POST /{root}/{path} HTTP/1.1\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def answer(session: Session, retries: int = 0) -> str | None:
    async with network_client_of(session, retries) as client:
        return (await client.chat.completions.create(model="any", messages=[USER])).choices[0].message.content


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_it_listens_on_this_machine_alone_and_bounds_a_body(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    async with served(body_mib=1, host=host) as (_, session):
        assert session.url.startswith(f"http://{f'[{host}]' if ':' in host else host}:")
        assert await answer(session) == "hi"
        async with network_client_of(session) as client:
            with pytest.raises(openai.NotFoundError, match="is not served"):
                await client.embeddings.create(model="any", input="text")
            with pytest.raises(openai.APIStatusError, match="more than 1 MiB") as caught:
                await client.completions.create(model="any", prompt="a" * (2 << 20))
            assert caught.value.status_code == 413


async def test_connections_that_ask_nothing_or_never_end_a_request_are_left() -> None:
    async with served(connections=4, timeout=0.2) as (_, session):
        idle = [await connect(session) for _ in range(6)]
        idle[0][1].write(b"GET / HT")
        assert [await reader.read() for reader, _ in idle] == [b""] * 6
        for _, writer in idle:
            writer.close()
        assert await answer(session, retries=20) == "hi"  # on a slow machine this client may be left, too

        (reader, writer), status = idle[0], b""
        while not status:
            reader, writer = await connect(session)
            writer.write(b"GET /s/x/v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            with suppress(ConnectionError):  # as this one
                status = await reader.readline()
        assert status == b"HTTP/1.1 401 Unauthorized\r\n"

        async def drip() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        with suppress(ConnectionError):  # what it sent last was not read
            await reader.read()
        dripping.cancel()
        writer.close()


class Long(ScriptedSampler):
    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for batch in super().generate(prompts, sampling):
            yield batch.assign(completion=["a" * (8 << 20)] * len(batch))


async def test_a_client_that_never_reads_its_stream_is_left() -> None:
    async with served(Long(lambda prompt: "a"), timeout=0.2, requests=1) as (gateway, session):
        host, port = session.url.split("/")[2].split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        writer.write(request(session, "chat/completions", model="", messages=[USER], n=2, stream=True))
        while not len(session.conversation):  # noqa: ASYNC110 -- the server tells nobody
            await asyncio.sleep(0.01)
        async with network_client_of(session) as other:
            while True:  # until there is room for another request
                with suppress(openai.RateLimitError):
                    await other.models.list()
                    break
                await asyncio.sleep(0.01)
        writer.close()
        assert len(gateway.close(session)) == 2
        del reader


class Held(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__(lambda prompt: prompt)
        self.may = asyncio.Event()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        await self.may.wait()
        async for batch in super().generate(prompts, sampling):
            yield batch


async def test_many_connections_lose_nothing_and_a_bound_refuses_the_rest() -> None:
    for bound, refused, status in (({}, 0, None), ({"requests": 20}, 80, 429), ({"connections": 60}, 41, 503)):
        sampler = Held()
        async with served(sampler, **bound) as (gateway, session):
            open_ones = [await connect(session) for _ in range(100)]

            async def ask(number: int, session: Session = session, open_ones: Any = open_ones) -> int:
                reader, writer = open_ones[number]
                writer.write(request(session, "completions", model="", prompt=f"<{number}>", max_tokens=20))
                head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
                writer.close()
                found = int(head.split()[1])
                assert found != 200 or json.loads(body)["choices"][0]["text"] == f"<{number}>"
                return found

            found: list[int] = []
            for told in asyncio.as_completed(map(ask, range(100))):
                if len(found) == refused:  # so many at least have no room, and were told so
                    sampler.may.set()
                found.append(await told)
            assert found[:refused] == [status] * refused
            assert {*found} <= {200, status}
            assert "connections" in bound or found.count(200) == 100 - refused
            assert len(gateway.close(session)) == found.count(200)


async def test_a_gateway_that_is_closed_draws_nothing_more() -> None:
    async with served() as (gateway, before):
        pass
    async with opened(gateway) as talk:
        assert before.url.split("/")[2] != talk.session.url.split("/")[2] == "meshrl.invalid"
        with pytest.raises(openai.InternalServerError, match="the gateway is closed"):
            await talk.ask()


async def test_an_idle_connection_lives_as_long_as_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    clock = loop.time
    async with served(timeout=60) as (_, session):
        reader, writer = await connect(session)

        async def answered() -> bytes:
            writer.write(b"GET /s/x/v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            return await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))

        await answered()
        monkeypatch.setattr(loop, "time", lambda: clock() + 55)  # as if so many seconds had passed
        await asyncio.sleep(0)
        assert await answered()
        monkeypatch.setattr(loop, "time", lambda: clock() + 55 + 61)
        assert await reader.read() == b""
        writer.close()


SOLVE = """
import httpx2

BODY = {"model": "any", "messages": [{"role": "user", "content": "?"}]}

async def solve(client, row):
    async with httpx2.AsyncClient(trust_env=False) as http:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        told = await http.post(f"{client.base_url}chat/completions", json=BODY, headers=headers)
    again = await client.chat.completions.create(**BODY)
    return float([told.json()["choices"][0]["message"]["content"], again.choices[0].message.content] == row["answer"])
"""


async def test_the_url_of_an_async_functions_client_is_served(tmp_path: Path) -> None:
    file = tmp_path / "framework.py"
    file.write_text(SOLVE, "utf-8")
    sampler, agent = ScriptedSampler(["a", "b"]), Agent(AgentConfig(source=f"{file}:solve"))
    gateway = Gateway(sampler, ScriptedChat())
    async with Agents(sampler, agent, gateway).serving():
        episode = await agent.play(gateway, {"answer": ["a", "b"]}, Sampling(max_tokens=10))
    assert (episode.error, episode.reward, len(episode.rows)) == (None, 1.0, 2)


OWN = """
async def solve(client, row):
    return (await type(client)(base_url=str(client.base_url), api_key="x", max_retries=0).models.list()).data

async def own(client, row):
    return (await type(client)(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0).models.list()).data

async def fails(client, row):
    raise LookupError("no words")
"""


@pytest.mark.parametrize("play", [lambda main: asyncio.run(main()), simulate], ids=["clock", "virtual"])
def test_a_url_that_nobody_serves_is_told_with_what_to_do(play: Callable[[Any], object], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, "utf-8")

    async def main() -> None:
        async with aclosing(Gateway(ScriptedSampler([]), ScriptedChat())) as gateway:
            agents = [Agent(AgentConfig(source=f"{tmp_path}/own.py:{name}")) for name in ("fails", "own", "solve")]
            errors = [(await agent.play(gateway, {}, Sampling(max_tokens=10))).error for agent in agents[:2]]
            assert errors[0] == "LookupError: no words"
            assert str(errors[1]).startswith(("APIConnectionError", "ExceptionGroup"))
            with pytest.raises(ConfigError, match=r"APIConnectionError: .*play inside `async with gateway\.serving"):
                await agents[2].play(gateway, {}, Sampling(max_tokens=10))

    play(main)


async def test_collections_pass_over_what_was_there_before_until_the_last_server_ends() -> None:
    @asynccontextmanager
    async def serving() -> AsyncGenerator[None]:
        async with Gateway(ScriptedSampler([]), ScriptedChat()).serving() as gateway, httpx2.AsyncClient() as http:
            assert (await http.get(gateway.open(SAMPLING).url)).status_code >= 400
            yield

    counts = [gc.get_freeze_count()]
    async with serving():
        counts.append(gc.get_freeze_count())
        async with serving():
            pass
        counts.append(gc.get_freeze_count())
    counts.append(gc.get_freeze_count())
    before, *while_serving, after = counts
    assert before == after
    assert min(while_serving) > before + 10_000
