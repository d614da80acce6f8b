"""A model that says what a test has written: a sampler and its chat format. One token for each character."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from meshrl.agents import Message, Tool
from meshrl.data import Batch
from meshrl.roles import Completion, ModelConfig, Sampling, SteppingSampler, completed
from meshrl.weights import Weights

END: Final = "\0"
"""Ends a turn."""
_TOOLS: Final = "tools: "
_ASSISTANT: Final = "assistant: "


class ScriptedChat:
    """As `meshrl.agents.Chat`: a line for each message, `user: hello`, and for the tools that are offered."""

    ends: frozenset[int] = frozenset({0})
    max_tokens = 1 << 20

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The lines, each after the first at the end of a turn, and `assistant: `."""
        offered = [f"{_TOOLS}{json.dumps(list(tools))}{END}\n"] if tools else []
        lines = [f"{message.role}: {message.content}{END}\n" for message in messages]
        return "".join([*offered, *lines, _ASSISTANT])

    def encode(self, text: str) -> Sequence[int]:
        """The number of each character."""
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The characters, without the one that ends a turn."""
        return "".join(map(chr, tokens)).replace(END, "")


def reply(text: str) -> str:
    """What a good model says to a conversation of `ScriptedChat`.

    It calls the first tool that it is offered, with what it was told last for each argument, and repeats the answer;
    without a tool it repeats what it was told. A text that is no conversation it repeats, and to none it says nothing.
    """
    *lines, last = text.split(f"{END}\n")
    if not lines:
        return last.removesuffix(_ASSISTANT)
    role, _, told = lines[-1].partition(": ")
    if not lines[0].startswith(_TOOLS) or role == "tool":
        return told
    function = json.loads(lines[0].removeprefix(_TOOLS))[0]["function"]
    arguments = dict.fromkeys((function.get("parameters") or {}).get("properties") or (), told)
    return json.dumps({"name": function["name"], "arguments": arguments}, separators=(",", ":"))


class Said(NamedTuple):
    """What a sampler draws of a text."""

    drawn: str
    """A token for each character, the end of the text and the text that stopped it among them."""
    completion: str
    """What a reader gets: without those."""
    truncated: bool


def said(text: str, stop: Sequence[str], max_tokens: int) -> Said:
    """A text as it is drawn: to its end, a text that stops it, or the limit, whichever comes first."""
    whole = f"{text}{END}"
    for each in stop:
        whole = whole[: whole.find(each) + len(each)] if each in whole else whole
    drawn = whole[:max_tokens]
    completion = drawn.replace(END, "")
    for each in stop:
        completion = completion.partition(each)[0]
    return Said(drawn, completion, len(whole) > max_tokens)


def read_chat(_config: ModelConfig) -> ScriptedChat:
    """How a model of the backend `fake` converses."""
    return ScriptedChat()


class ScriptedSampler(SteppingSampler):
    """Says what a script says: a function of the prompt's text, or texts, one after the other; then IndexError.

    Each text is a turn, ended by a token of its own where there is room for it. Log-probs are -0.5.
    """

    def __init__(self, script: Callable[[str], str] | Iterable[str]) -> None:
        self._script = script if callable(script) else _next_of(script)
        self._version = 0
        self.asked: list[str] = []
        """The text of each prompt that it was asked to go on from."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Row by row."""
        rows = prompts.repeat(sampling.n)
        async with self.generate_calls.begin(sampling.beside) as call:
            for index in range(len(rows)):
                aborted = not await call.step()
                yield self._row(rows.select([index]), sampling, aborted)

    async def load(self, weights: Weights) -> Batch:
        """Later texts are of this version."""
        async with self.generate_calls.loading() as places:
            self._version = weights.version
        return places

    def _row(self, row: Batch, sampling: Sampling, aborted: bool) -> Batch:
        given = row.tokens[0].tolist() if "tokens" in row else list(map(ord, str(row.objects("prompt")[0])))
        most = int(row.row("max_tokens")[0]) if "max_tokens" in row else sampling.max_tokens
        answer = Said("", "", False) if aborted else said(self._say("".join(map(chr, given))), sampling.stop, most)
        tokens = list(map(ord, answer.drawn))
        logprobs = [-0.5] * len(tokens)
        drawn = Completion(answer.completion, given, tokens, logprobs, truncated=answer.truncated, aborted=aborted)
        return completed(row, [drawn], self._version, sampling)

    def _say(self, prompt: str) -> str:
        self.asked.append(prompt)
        return self._script(prompt)


def _next_of(texts: Iterable[str]) -> Callable[[str], str]:
    left = list(texts)

    def say(_: str) -> str:
        return left.pop(0)

    return say
