"""Agents of real frameworks, of 20 turns with thoughts and tools: `make test-clients` installs the frameworks."""

import gc
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from meshrl import Sampling
from meshrl.agents import Agent, AgentConfig, Gateway
from meshrl.testing import ScriptedSampler
from tests.agents.talks import ASSISTANT, END, ChatML, line, merged

pytest.importorskip("langgraph", reason="the frameworks are in an environment of their own: `make test-clients`")
pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks leave connections open

TURNS = 20
FIRST, STEP = 1, 7
ROW = {"prompt": f"Begin at {FIRST}.", "answer": str(FIRST + STEP * (TURNS - 1))}
STOP = "</code>"  # what smolagents stops at
THOUGHT = f"<think>\n{'That is the number, so there is another. ' * 10}\n</think>\n\n"


@pytest.fixture(scope="session", autouse=True)
def _connections() -> Iterator[None]:
    """What they leave goes before the filter of warnings does."""
    yield
    gc.collect()


def call_following(number: int, ends: bool) -> str:
    return f"The number is {number}" if ends else called("following", number=number)


def call_bash(number: int, ends: bool) -> str:
    return f"I add the step.\n{called('bash', command=added(number, ends))}"


def write_bash(number: int, ends: bool) -> str:
    return f"I add the step.\n\n```mswea_bash_command\n{added(number, ends)}\n```"


def write_code(number: int, ends: bool) -> str:
    return f"I add the step.\n<code>\n{f'final_answer({number})' if ends else f'print(following({number}))'}\n{STOP}"


def added(number: int, ends: bool) -> str:
    return f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo {number}" if ends else f"echo $(({number} + {STEP}))"


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


Speaks: TypeAlias = Callable[[int, bool], str]


class Recorder:
    """Keeps the bodies of requests."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.bodies: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()

        async def received() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                self.bodies.append(json.loads(body))
            return message

        await self.app(scope, received, send)


def whole(first: str, drawn: Sequence[str], sent: Any) -> str:
    """The tokens of an unchanged history: the first prompt, then in turn what was drawn, and what the client sent."""
    answers = iter(drawn)
    text, added = first + next(answers), ""
    items = [item for each in sent.get("messages") or sent["input"] for item in items_of(each)]
    begin = next(index for index, each in enumerate(items) if is_answer(each))
    for is_said, group in groupby(items[begin:], is_answer):
        each = list(group)
        if is_said:  # smolagents joins a message of its own to the model's
            _, *rest = text_of(each[0].get("content") or "").partition("Calling tools:\n")
            added = line("assistant", "".join(rest)) if any(rest) else ""
        else:
            lines = [line(one.get("role", "tool"), text_of(one.get("content", one.get("output")))) for one in each]
            text = f"{text.removesuffix(END)}{END}" + merged("".join(["\n", added, *lines, ASSISTANT])) + next(answers)
    assert not list(answers)
    return text


def items_of(message: Any) -> Sequence[Any]:
    """Results of tools, which Anthropic's client has in one message of the user, or the message."""
    results = [part for part in message.get("content") or () if "tool_use_id" in part]
    return [{"role": "tool", "content": part["content"]} for part in results] or [message]


def is_answer(item: Any) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def turns_of(file: str, speaks: Speaks, *names: str) -> Iterator[Any]:
    return (pytest.param(f"{file}:{name}", speaks, id=f"{file}:{name}") for name in names)


@pytest.mark.asyncio(loop_scope="module")  # a framework may keep a connection for the next agent
@pytest.mark.parametrize(
    ("name", "speaks"),
    [
        *turns_of("langgraph_agent.py", call_following, "plain", "streamed", "solve", "responses"),
        *turns_of("openai_agents_agent.py", call_following, "plain", "streamed", "solve", "responses"),
        *turns_of("pydantic_ai_agent.py", call_following, "plain", "streamed", "solve", "responses"),
        *turns_of("litellm_agent.py", call_following, "plain", "streamed", "solve"),
        *turns_of("autogen_agent.py", call_following, "plain", "streamed", "solve"),
        *turns_of("anthropic_agent.py", call_following, "plain", "streamed", "solve"),
        *turns_of("smolagents_agent.py", write_code, "plain", "streamed"),
        *turns_of("mini_swe_agent.py", call_bash, "plain"),
        *turns_of("mini_swe_agent.py", write_bash, "texts"),
    ],
)
async def test_an_agents_turns_are_one_row_of_what_the_model_drew(name: str, speaks: Speaks) -> None:
    drawn: list[str] = []

    def model(prompt: str) -> str:
        number = int(re.findall(r"\d+", prompt)[-1]) if drawn else FIRST
        said = THOUGHT + speaks(number, len(drawn) == TURNS - 1)
        drawn.append(said if said.endswith(STOP) else f"{said}{END}")
        return said

    sampler = ScriptedSampler(model)
    gateway = Gateway(sampler, ChatML())
    recorder = gateway.app = Recorder(gateway.app)
    agent = Agent(AgentConfig(source=f"{Path(__file__).parent}/programs/{name}", timeout=500))
    async with gateway.serving():
        episode = await agent.play(gateway, ROW, Sampling(max_tokens=4000))
    assert (episode.error, episode.reward, episode.turns) == (None, 1.0, TURNS)
    assert episode.rows.rewards.tolist() == [1.0]
    expected = whole(sampler.asked[0], drawn, recorder.bodies[-1])
    (tokens,), (mask,) = episode.rows.tokens, episode.rows.loss_mask
    assert "".join(map(chr, tokens)) == expected
    assert "".join(map(chr, tokens[np.asarray(mask, np.bool_)])) == "".join(drawn)


def test_the_page_names_the_versions() -> None:
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text("utf-8")
    named = re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", page)
    assert len(named) == 10
    assert named == [(name, version(name)) for name, _ in named]
