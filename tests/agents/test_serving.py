"""The gateway's server: where it listens, what it bounds, whom it leaves, and how it ends."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import openai
import pytest

from meshrl import Batch, Sampling
from meshrl.agents import Gateway, GatewayConfig, Session
from meshrl.testing import ScriptedChat, ScriptedSampler
from tests.agents.talks import USER, opened


@asynccontextmanager
async def served(sampler: ScriptedSampler | None = None, **config: Any) -> AsyncGenerator[tuple[Gateway, Session]]:
    """Behind a real server, on a port of this machine."""
    sampler = sampler or ScriptedSampler(lambda prompt: "hi")
    async with Gateway(sampler, ScriptedChat(), GatewayConfig(**config)).serving() as gateway:
        yield gateway, gateway.open(Sampling(max_tokens=1 << 24))


def network_client_of(session: Session, retries: int = 0) -> openai.AsyncOpenAI:
    """The real client, which asks no proxy for this machine."""
    http = httpx2.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=session.url, api_key=session.token, max_retries=retries, http_client=http)


async def connect(session: Session) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = session.url.split("/")[2].split(":")
    return await asyncio.open_connection(host, int(port))


def request(session: Session, path: str, **asked: Any) -> bytes:
    """A request as it goes over a connection, which ends with it."""
    address, _, root = session.url.removeprefix("http://").partition("/")
    body = json.dumps(asked)
    head = f"Host: {address}\r\nAuthorization: Bearer {session.token}\r\nConnection: close"
    return f"POST /{root}/{path} HTTP/1.1\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def answer(session: Session, retries: int = 0) -> str | None:
    async with network_client_of(session, retries) as client:
        return (await client.chat.completions.create(model="any", messages=[USER])).choices[0].message.content


async def test_it_listens_on_this_machine_alone_and_bounds_a_body() -> None:
    async with served(body_mib=1) as (_, session):
        assert session.url.startswith("http://127.0.0.1:")
        assert await answer(session) == "hi"
        async with network_client_of(session) as client:
            with pytest.raises(openai.NotFoundError, match="is not served"):
                await client.embeddings.create(model="any", input="text")
            with pytest.raises(openai.APIStatusError, match="more than 1 MiB") as caught:
                await client.completions.create(model="any", prompt="a" * (2 << 20))
            assert caught.value.status_code == 413


async def test_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with served(host="::1") as (_, session):
        assert session.url.startswith("http://[::1]:")
        assert await answer(session) == "hi"


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
    """Its answers have few tokens and long texts."""

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
    """Repeats what it is asked, once it may."""

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
        assert before.url.split("/")[2] != talk.session.url.split("/")[2] == "meshrl"
        with pytest.raises(openai.InternalServerError, match="the gateway is closed"):
            await talk.ask()
