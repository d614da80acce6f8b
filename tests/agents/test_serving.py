"""The gateway's server: where it listens, whom it leaves, and how it ends."""

import asyncio
import socket
from contextlib import suppress
from typing import Any

import httpx2
import openai
import pytest

from meshrl import Sampling
from meshrl.agents import Gateway, GatewayConfig, Session
from meshrl.testing import ScriptedChat, ScriptedSampler

USER: Any = {"role": "user", "content": "hello"}


def gateway_of(**config: Any) -> Gateway:
    return Gateway(ScriptedSampler(lambda prompt: "hi"), ScriptedChat(), GatewayConfig(**config))


def client_of(session: Session) -> openai.AsyncOpenAI:
    """The real client, which asks no proxy for this machine."""
    http = httpx2.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=session.url, api_key=session.token, max_retries=0, http_client=http)


async def test_connections_that_ask_nothing_are_left() -> None:
    async with gateway_of(connections=4, timeout=0.2).serving() as gateway:
        session = gateway.open(Sampling(max_tokens=1000))
        host, port = session.url.split("/")[2].split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        idle[0][1].write(b"GET / HT")
        async with asyncio.timeout(60):
            assert [await reader.read() for reader, _ in idle] == [b""] * 6
        async with client_of(session).with_options(max_retries=20) as client:  # a slow one may be left, too
            told = await client.chat.completions.create(model="any", messages=[USER])
        assert told.choices[0].message.content == "hi"
        for _, writer in idle:
            writer.close()


async def test_a_connection_that_never_ends_its_second_request_is_left() -> None:
    async with gateway_of(timeout=0.5).serving() as gateway:
        host, port = gateway.open(Sampling()).url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))

        async def drip() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        writer.write(b"GET /s/x/v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(60):
            with suppress(ConnectionError):  # what it sent last was not read
                await reader.read()
        dripping.cancel()
        writer.close()


async def test_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with gateway_of(host="::1").serving() as gateway:
        session = gateway.open(Sampling(max_tokens=1000))
        assert session.url.startswith("http://[::1]:")
        async with client_of(session) as client:
            told = await client.chat.completions.create(model="any", messages=[USER])
        assert told.choices[0].message.content == "hi"


async def test_a_gateway_that_is_closed_draws_nothing_more() -> None:
    async with gateway_of().serving() as gateway:
        before = gateway.open(Sampling(max_tokens=1000))
    session = gateway.open(Sampling(max_tokens=1000))
    assert before.url.split("/")[2] != session.url.split("/")[2] == "meshrl"
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
    async with openai.AsyncOpenAI(
        base_url=session.url, api_key=session.token, max_retries=0, http_client=http
    ) as client:
        with pytest.raises(openai.InternalServerError, match="the gateway is closed"):
            await client.chat.completions.create(model="any", messages=[USER])
