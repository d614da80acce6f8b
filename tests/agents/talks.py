"""Programs that talk to a scripted model by the real client, in virtual time."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx2
import openai

from meshrl import Batch, Sampling
from meshrl.agents import Gateway, Session
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate

USER: Any = {"role": "user", "content": "hello"}


@dataclass
class Talk:
    """A client of a session of a gateway."""

    client: openai.AsyncOpenAI
    gateway: Gateway
    session: Session

    def rows(self) -> Batch:
        """What was recorded; the session is closed."""
        return self.gateway.close(self.session)


Program: TypeAlias = Callable[[Talk], Coroutine[Any, Any, None]]


def client_of(gateway: Gateway, url: str, key: str, retries: int = 0) -> openai.AsyncOpenAI:
    """The real client of a session, without a network."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries, http_client=http)


def talking(script: Any) -> Callable[[Program], Callable[[], None]]:
    """A test that is a program, to which the model says the script."""

    def made(program: Program) -> Callable[[], None]:
        async def main() -> None:
            gateway = Gateway(ScriptedSampler(script), ScriptedChat())
            session = gateway.open(Sampling(max_tokens=1000))
            async with client_of(gateway, session.url, session.token) as client:
                await program(Talk(client, gateway, session))
            await gateway.aclose()

        def test() -> None:
            simulate(main)

        test.__doc__ = program.__doc__
        return test

    return made
