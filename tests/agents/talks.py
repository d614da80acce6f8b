"""Programs that talk to a scripted model by the real client, in virtual time."""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx2
import openai

from meshrl import Batch, Sampling
from meshrl.agents import NAME, Agent, CallForm, Episode, Gateway, Message, Session, Tool
from meshrl.data import Constraint
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate

ROW = {"prompt": "1+1=", "answer": "2"}
USER: Any = {"role": "user", "content": "hello"}
SAMPLING = Sampling(max_tokens=1000)
END, ASSISTANT, PAIR = "\0", "<assistant>\n", "\ue000"


class ChatML:
    """Calls as Hermes writes them. `th` is one token of text, which the model draws as two."""

    ends = frozenset({0})
    max_tokens = native_tokens = 1 << 20
    backends: tuple[str, str] = ("fake", "")
    calls = CallForm(f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        shown: list[Any] = [message.shown() for message in messages]
        return json.dumps(list(tools)) + "".join(line(**each) for each in shown) + ASSISTANT

    def encode(self, text: str, after: Sequence[int] = ()) -> Sequence[int]:
        return list(map(ord, merged(text)))

    def begin(self, text: str) -> Sequence[int]:
        return self.encode(text)

    def decode(self, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
        return "".join(map(chr, tokens)).replace(PAIR, "th").replace(END, "")

    def check(self, constraint: Constraint) -> None:
        """The backend refuses every constraint."""


def merged(text: str) -> str:
    return text.replace("th", PAIR)


def line(role: str, content: str, tool_calls: Any = (), **_: Any) -> str:
    calls = [f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in tool_calls]
    return f"<{role}>\n{content}{''.join(calls)}{END}\n"


@dataclass
class Talk:
    gateway: Gateway
    session: Session
    client: openai.AsyncOpenAI
    sampler: Any = None

    async def ask(self, messages: Any = (USER,), **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, **more)

    async def complete(self, prompt: str, **more: Any) -> Any:
        return await self.client.completions.create(model="any", prompt=prompt, **more)

    def rows(self) -> Batch:
        return self.gateway.close(self.session)


def client_of(gateway: Gateway, url: str, key: str) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


@asynccontextmanager
async def opened(gateway: Gateway, sampling: Sampling = SAMPLING, sampler: Any = None) -> AsyncGenerator[Talk]:
    session = gateway.open(sampling)
    async with client_of(gateway, session.url, session.token) as client:
        yield Talk(gateway, session, client, sampler)


Program: TypeAlias = Callable[[Talk], Coroutine[Any, Any, None]]


def talking(says: Any) -> Callable[[Program], Callable[[], None]]:
    def made(program: Program) -> Callable[[], None]:
        async def main() -> None:
            sampler = says() if isinstance(says, type) else ScriptedSampler(says)
            gateway = Gateway(sampler, ScriptedChat())
            async with opened(gateway, sampler=sampler) as talk:
                await program(talk)
            await gateway.aclose()

        return lambda: simulate(main)

    return made


async def served(agent: Agent, *script: str) -> Episode:
    async with Gateway(ScriptedSampler(script), ScriptedChat()).serving() as gateway:
        return await agent.play(gateway, ROW, Sampling(max_tokens=100))
