"""A history that means the same is the same, however a client spells it: one row of the tokens that were drawn."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from meshrl import Sampling
from meshrl.agents import Gateway, Session
from meshrl.testing import ScriptedSampler, simulate
from tests.agents.talks import ASSISTANT, END, ChatML, line, merged

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FIRST: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Begin."}]
TURNS = 8


def says(prompt: str) -> str:
    """Thinks, and calls a tool twice or says a number."""
    turn = prompt.count(ASSISTANT)
    calls = [f'{{"name": "add", "arguments": {{"x": {turn}.0, "y": {{"b": [1, "ä"], "a": {n}}}}}}}' for n in (1, 2)]
    written = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls if turn % 2)
    return f"<think>\nThis is\nthought {turn}.\n</think>\n\nStep  {turn}.{written}"


@dataclass
class Client:
    http: httpx2.AsyncClient
    session: Session
    gateway: Gateway
    sampler: ScriptedSampler
    history: list[Any] = field(default_factory=lambda: deepcopy(FIRST))

    async def ask(self, messages: Any, path: str = "chat/completions", **more: Any) -> Any:
        body = {"model": "any", "input" if path == "responses" else "messages": messages, **more}
        told = await self.http.post(f"{self.session.url}/{path}", json=body)
        assert told.status_code == 200, told.text
        return told.json()

    async def turn(self, shown: Callable[[list[Any]], list[Any]] = list, tools: Any = (TOOL,)) -> None:
        """Ask with the history as `shown` has it, and add what a program adds."""
        said = (await self.ask(shown(deepcopy(self.history)), tools=list(tools)))["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in said.get("tool_calls", ())]
        self.history += [said, *(results or [{"role": "user", "content": "Go on."}])]

    def rows(self) -> list[str]:
        return ["".join(map(chr, tokens)) for tokens in self.gateway.close(self.session).tokens]


@asynccontextmanager
async def client_of(model: Callable[[str], str] = says) -> AsyncGenerator[Client]:
    sampler = ScriptedSampler(model)
    gateway = Gateway(sampler, ChatML())
    session, app = gateway.open(Sampling(max_tokens=4000)), httpx2.ASGITransport(app=gateway.app)
    async with httpx2.AsyncClient(transport=app, headers={"Authorization": f"Bearer {session.token}"}) as http:
        yield Client(http, session, gateway, sampler)
    await gateway.aclose()


def expected(turns: int = TURNS) -> str:
    """The row of a history that is sent back as it was received, by hand."""
    text = json.dumps([TOOL]) + "".join(line(**each) for each in FIRST) + ASSISTANT
    text = merged(text)
    for turn in range(1, turns + 1):
        text += says(ASSISTANT * turn) + END
        between = line("tool", "3") * 2 if turn % 2 else line("user", "Go on.")
        text += f"\n{between}{ASSISTANT}" if turn < turns else ""
    return text


def thought_of(message: Any) -> tuple[str, str]:
    thought, _, said = str(message["content"]).partition("</think>")
    return thought.removeprefix("<think>"), said


def moved(name: str, form: Callable[[str], Any] = str.strip) -> Callable[[Any], Any]:
    return lambda message: {**message, "content": thought_of(message)[1], name: form(thought_of(message)[0])}


def in_parts(message: Any) -> Any:
    thought, said = thought_of(message)
    parts = [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:], "annotations": []}]
    return {**message, "content": [{"type": "thinking", "thinking": thought, "signature": ""}, *parts]}


def retagged(message: Any) -> Any:
    thought, said = thought_of(message)
    return {**message, "content": f"<thinking>{'  '.join(thought.split())}</thinking>{said}"}


ANSWERS: list[Callable[[Any], Any]] = [
    moved("reasoning_content"),
    moved("reasoning"),
    moved("thinking_blocks", lambda thought: [{"type": "thinking", "thinking": thought, "signature": "x"}]),
    moved("reasoning_details", lambda thought: [{"type": "reasoning.text", "text": thought}]),
    lambda message: {**message, "reasoning_content": thought_of(message)[0]},
    in_parts,
    retagged,
    lambda message: {**message, "content": f"\n {message['content']}\n\n"},
    lambda message: message,
    moved("reasoning_content", lambda thought: None),
]
CALLS: list[Callable[[Any], Any]] = [
    json.loads,
    lambda arguments: json.dumps(dict(reversed(json.loads(arguments).items())), indent=2),
    lambda arguments: json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":")).replace(".0", ""),
    lambda arguments: arguments,
]
EMPTY: Any = {"refusal": None, "audio": None, "annotations": [], "function_call": None}


def respelled(messages: list[Any], random: Random, drops: bool = True) -> list[Any]:
    """What clients do to a history that changes nothing in what was said. `drops`: thoughts and ids may be gone."""
    given: list[Callable[[str], str | None]] = [str, lambda name: f"toolu_{name[::-1]}", lambda name: None]
    ids = random.choice(given[: 2 + drops])
    new = next((at for at, each in enumerate(reversed(messages)) if each["role"] == "assistant"), len(messages))
    old, unseen = messages[: len(messages) - new], messages[len(messages) - new :]
    named = [{**each, "tool_call_id": ids(each["tool_call_id"])} if each["role"] == "tool" else each for each in unseen]
    return [*(again(message, random, ids, ANSWERS[: len(ANSWERS) - 1 + drops]) for message in old), *named]


def again(
    message: Any, random: Random, ids: Callable[[str], str | None], answers: Sequence[Callable[[Any], Any]]
) -> Any:
    def respelt(call: Any) -> Any:
        arguments = random.choice(CALLS)(call["function"]["arguments"])
        return {**call, "id": ids(call["id"]), "function": {**call["function"], "arguments": arguments}}

    if message["role"] == "assistant":
        message = random.choice(answers)(message)
        calls = list(map(respelt, message.pop("tool_calls", [])))
        message |= random.choice([{}, EMPTY])
        message |= {"tool_calls": calls} if calls else random.choice([{}, {"tool_calls": []}])
        return message | random.choice([{}, {"name": "solver"}, {"name": None}])
    if message["role"] == "tool":
        message = {**message, "tool_call_id": ids(message["tool_call_id"])} | random.choice([{}, {"name": "add"}])
    if message["role"] == "system":
        message["role"] = random.choice(["system", "developer"])
    content = random.choice([f"{message['content']}\n", [{"type": "text", "text": message["content"]}]])
    return {**message, "content": random.choice([message["content"], content])}


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 1000), marks=pytest.mark.wide)])
def test_any_spelling_of_a_history_is_one_row_of_what_was_drawn(seeds: range) -> None:
    async def main(seed: int) -> None:
        random = Random(seed)
        async with client_of() as client:
            for _ in range(TURNS):
                await client.turn(lambda history: respelled(history, random) if seed else history)
            assert client.rows() == [expected()], seed

    with capture_logs() as logs:
        for seed in seeds:
            simulate(lambda seed=seed: main(seed))  # type: ignore[misc]
    assert logs == []


def edited(at: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda history: [*history[:at], change(history[at]), *history[at + 1 :]]


def with_text(text: str) -> Callable[[Any], Any]:
    return lambda message: {**message, "content": message["content"].replace("Step", text).replace("3", text)}


def with_call(name: str, arguments: str) -> Callable[[Any], Any]:
    return lambda message: {
        **message,
        "tool_calls": [{**call, "function": {"name": name, "arguments": arguments}} for call in message["tool_calls"]],
    }


# The history: system, user; 2 an answer with two calls, 3 and 4 their results; 5 an answer, 6 the user; 7 calls again.
CHANGES: dict[str, tuple[Callable[[list[Any]], list[Any]], str, int]] = {
    "the text of an answer": (edited(5, with_text("Stop")), "content", 1),
    "its inner spaces": (edited(5, lambda m: {**m, "content": m["content"].replace("  ", " ")}), "content", 1),
    "a text behind it": (edited(5, lambda m: {**m, "content": m["content"] + " I am sure."}), "content", 1),
    "its thoughts": (edited(5, lambda m: {**m, "content": "<think>No.</think>" + thought_of(m)[1]}), "thoughts", 1),
    "a value of an argument": (edited(2, with_call("add", '{"x": 1.5}')), "tool_calls[0].function.arguments", 0),
    "the name of a function": (edited(2, with_call("sub", '{"x": 1, "y": {"b": [1, "ä"], "a": 1}}')), "tool_calls", 0),
    "its calls": (edited(2, lambda m: {**m, "tool_calls": []}), "tool_calls", 0),
    "a result": (edited(4, with_text("4")), "content", 1),
    "the order of results": (lambda h: [*h[:3], h[4], h[3], *h[5:]], "tool_call_id", 1),
    "the system message": (edited(0, lambda m: {**m, "content": "Add!"}), "content", 0),
    "a first turn that is gone": (lambda h: [*h[:2], *h[5:]], "content", 0),
    "a turn that is gone": (lambda h: [*h[:5], *h[7:]], "content", 1),
    "an answer that is gone": (lambda h: [*h[:5], *h[6:]], "role", 1),
    "a summary": (lambda h: [*h[:1], {"role": "user", "content": "Begin at 7."}, *h[-3:]], "content", 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_real_change_branches_once_and_the_log_says_which(name: str) -> None:
    change, changed, turn = CHANGES[name]

    async def main() -> None:
        random = Random(3)
        async with client_of() as client:
            for _ in range(3):
                await client.turn(lambda history: respelled(history, random, drops=False))
            before = deepcopy(client.history)
            client.history = change(client.history)
            assert client.history != before
            for _ in range(3):
                await client.turn(lambda history: respelled(history, random, drops=False))
            one, other = client.rows()
            assert one == expected(3)
            assert other.endswith(says(client.sampler.asked[-1]) + END)
            assert other.startswith(one[: one.index(ASSISTANT)]) != (name in ("the system message", "a summary"))

    with capture_logs() as logs:
        simulate(main)
    (said,) = logs
    assert (said["log_level"], said["field"], said["turn"]) == ("info", changed, turn)
    assert said["before"] != said["after"]


def test_a_change_is_logged_after_many_sub_agents_too() -> None:
    async def main() -> None:
        async with client_of(lambda prompt: "Found." if "Find" in prompt else says(prompt)) as client:
            for _ in range(3):
                await client.turn()
            planner = client.history
            for number in range(40):
                client.history = [{"role": "user", "content": f"Find {number}."}]
                await client.turn()
            client.history = CHANGES["the system message"][0](planner)
            await client.turn()

    with capture_logs() as logs:
        simulate(main)
    assert [(said["field"], said["turn"]) for said in logs] == [("content", 0)]


def test_other_tools_begin_a_row_and_the_log_names_them() -> None:
    async def main() -> None:
        async with client_of() as client:
            for tools in ([TOOL], [TOOL, {"type": "function", "function": {"name": "sub"}}]):
                for _ in range(2):
                    await client.turn(tools=tools)
            assert len(client.rows()) == 2

    with capture_logs() as logs:
        simulate(main)
    assert [(said["field"], "sub" in said["after"]) for said in logs] == [("tools", True)]


def test_dropped_thoughts_are_in_the_prompt_of_a_changed_history_too() -> None:
    async def main() -> None:
        async with client_of() as client:
            for turn in range(4):
                client.history[0]["content"] = f"It is {turn} o'clock."  # each request begins a row
                await client.turn(lambda history: [again_without(each) for each in history])
            for turn, prompt in enumerate(client.sampler.asked, 1):
                assert [f"ought {n}." in prompt for n in range(1, 5)] == [n < turn for n in range(1, 5)]
            assert len(client.rows()) == 4

    def again_without(message: Any) -> Any:
        return moved("reasoning", lambda _: None)(message) if message["role"] == "assistant" else message

    simulate(main)


def test_sub_agents_tries_and_examples_are_no_changes() -> None:
    async def main() -> None:
        async with client_of() as client:
            example = [*FIRST, {"role": "assistant", "content": "Yes."}]
            for number in range(3):
                await client.ask([*example, {"role": "user", "content": f"{number}?"}])
                await client.ask([FIRST[0], {"role": "user", "content": f"{number}?"}])
            await client.ask(FIRST, n=2)
            await client.turn()
            await client.turn()

    with capture_logs() as logs:
        simulate(main)
    assert logs == []


def test_ids_tell_apart_calls_whose_thoughts_were_dropped() -> None:
    texts = iter([f'<think>{n}</think><tool_call>{{"name": "add"}}</tool_call>' for n in "ab"] + ["done"] * 2)

    async def main() -> None:
        async with client_of(lambda prompt: next(texts)) as client:
            told = (await client.ask(FIRST, n=2, tools=[TOOL]))["choices"]
            for choice in told:
                (call,) = choice["message"]["tool_calls"]
                said = {"role": "assistant", "content": None, "tool_calls": [call]}
                await client.ask(
                    [*FIRST, said, {"role": "tool", "tool_call_id": call["id"], "content": "3"}], tools=[TOOL]
                )
            assert [row.count("<think>") for row in client.rows()] == [1, 1]

    simulate(main)


def as_items(messages: list[Any]) -> list[Any]:
    items: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": "3"})
        elif message["role"] != "assistant":
            items.append({"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]})
        else:
            thought, said = thought_of(message)
            items.append({"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": thought}]})
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]})
            calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
            items += [{"type": "function_call", "call_id": i, "name": "add", "arguments": a} for i, a in calls]
    return items


def test_a_history_in_the_form_of_responses_is_the_same() -> None:
    async def main() -> None:
        async with client_of() as client:
            for _ in range(TURNS - 1):
                await client.turn()
            await client.ask(as_items(client.history), "responses", tools=[{"type": "function", **TOOL["function"]}])
            assert client.rows() == [expected()]

    simulate(main)


def test_what_a_client_joins_to_an_answer_is_a_message_of_its_own() -> None:
    """As smolagents does: it writes the text that stopped the answer, and its own message on a new line."""

    async def main() -> None:
        async with client_of(lambda prompt: f"<code>\nf({prompt.count('<code>')})\n</code>") as client:
            for _ in range(3):
                told = (await client.ask(client.history, stop=["</code>"]))["choices"][0]["message"]["content"]
                joined = f"{told.strip()}\n</code>\nCalling tools:\n[f]"
                client.history += [{"role": "assistant", "content": joined}, {"role": "user", "content": "3"}]
            (row,) = client.rows()
            assert (row.count("</code>"), row.count("<assistant>\nCalling tools:\n[f]\0\n")) == (3, 2)

    simulate(main)


def test_a_thought_without_an_end_and_one_without_a_beginning() -> None:
    for said, sent in (("<think>\nso", "so"), ("so\n</think>\n\n4", "4"), ("a <think>b</think> c", "a\n\nc")):

        async def main(said: str = said, sent: str = sent) -> None:
            async with client_of(lambda prompt: said) as client:
                for content in (said, sent):
                    await client.turn(tools=())
                    client.history[-2] = {"role": "assistant", "content": content}
                await client.turn(tools=())
                assert len(client.rows()) == 1

        simulate(main)
