"""A model that says what a test has written: a sampler and its chat format, with one token per character."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from meshrl.agents import NAME, CallForm, Message, Tool
from meshrl.data import Batch, Constraint, Weights
from meshrl.roles import Completion, ModelConfig, Sampling, SteppingSampler, completed

END: Final = "\0"
"""Ends a turn."""
_TOOLS: Final = "tools: "
_ASSISTANT: Final = "assistant: "


class ScriptedChat:
    """Like `meshrl.agents.Chat`: one line per message, `user: hello`, and one for the available tools."""

    ends: frozenset[int] = frozenset({0})
    max_tokens = native_tokens = 1 << 20
    backends: tuple[str, str] = ("fake", "")
    calls: CallForm = CallForm(f'{{"name": "{NAME}", "arguments": ', "}")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render the lines, and `assistant: `. A turn's end precedes each line except the first."""
        offered = [f"{_TOOLS}{json.dumps(list(tools))}{END}\n"] if tools else []
        lines = [f"{message.role}: {message.content}{END}\n" for message in messages]
        return "".join([*offered, *lines, _ASSISTANT])

    def encode(self, text: str, after: Sequence[int] = ()) -> Sequence[int]:
        """Encode each character as its code point."""
        return list(map(ord, text))

    def begin(self, text: str) -> Sequence[int]:
        """Encode each character as its code point."""
        return self.encode(text)

    def decode(self, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
        """Decode the characters, without those that end a turn."""
        return "".join(map(chr, tokens)).replace(END, "")

    def check(self, constraint: Constraint) -> None:
        """Raise nothing: the backend `fake` refuses every constraint."""


def reply(text: str) -> str:
    """The answer of a good model to a conversation of `ScriptedChat`.

    It calls the first available tool, with the last message as each argument, and repeats the result. Without a tool it
    repeats the last message. It repeats a text that is not a conversation, and answers nothing to an empty one.
    """
    *lines, last = text.split(f"{END}\n")
    if not lines:
        return last.removesuffix(_ASSISTANT)
    role, _, message = lines[-1].partition(": ")
    if not lines[0].startswith(_TOOLS) or role == "tool":
        return message
    function = json.loads(lines[0].removeprefix(_TOOLS))[0]["function"]
    arguments = dict.fromkeys((function.get("parameters") or {}).get("properties") or (), message)
    return json.dumps({"name": function["name"], "arguments": arguments}, separators=(",", ":"))


class Answer(NamedTuple):
    """A text as a sampler draws it."""

    drawn: str
    """One token per character, including the end of the text and the text that stopped it."""
    completion: str
    """The text without those."""
    truncated: bool


def cut_answer(text: str, stop: Sequence[str], max_tokens: int) -> Answer:
    """Cut a text at its end, a stop text, or the limit, whichever comes first."""
    whole = f"{text}{END}"
    for each in stop:
        whole = whole[: whole.find(each) + len(each)] if each in whole else whole
    drawn = whole[:max_tokens]
    completion = drawn.replace(END, "")
    for each in stop:
        completion = completion.partition(each)[0]
    return Answer(drawn, completion, len(whole) > max_tokens)


def read_chat(_config: ModelConfig) -> ScriptedChat:
    """The chat format of models of the backend `fake`."""
    return ScriptedChat()


class ScriptedSampler(SteppingSampler):
    """Says what a script says: a function of the prompt's text, or texts in order, followed by IndexError.

    Each text is a turn, followed by an end token if there is room for it. Log-probs are -0.5.
    """

    def __init__(self, script: Callable[[str], str] | Iterable[str]) -> None:
        self._script = script if callable(script) else _in_order(script)
        self._version = 0
        self.asked: list[str] = []
        """The text of each prompt."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield row by row."""
        rows = prompts.repeat(sampling.n)
        async with self.generate_calls.begin(sampling.beside) as call:
            for index in range(len(rows)):
                aborted = not await call.step()
                yield self._row(rows.select([index]), sampling, aborted)

    async def load(self, weights: Weights) -> Batch:
        """Give later texts this version."""
        async with self.generate_calls.loading() as places:
            self._version = weights.version
        return places

    def _row(self, row: Batch, sampling: Sampling, aborted: bool) -> Batch:
        given = row.tokens[0].tolist() if "tokens" in row else list(map(ord, str(row.objects("prompt")[0])))
        limit = int(row.row("max_tokens")[0]) if "max_tokens" in row else sampling.max_tokens
        stops = (*sampling.stop, *sampling.stop_tokens)
        answer = Answer("", "", False) if aborted else cut_answer(self._say("".join(map(chr, given))), stops, limit)
        tokens = list(map(ord, answer.drawn))
        logprobs = [-0.5] * len(tokens)
        drawn = Completion(answer.completion, given, tokens, logprobs, truncated=answer.truncated, aborted=aborted)
        return completed(row, [drawn], self._version, sampling)

    def _say(self, prompt: str) -> str:
        self.asked.append(prompt)
        return self._script(prompt)


def _in_order(texts: Iterable[str]) -> Callable[[str], str]:
    remaining = list(texts)
    return lambda _: remaining.pop(0)
