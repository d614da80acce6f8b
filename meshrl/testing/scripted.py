"""A model that says what a test has written: a sampler and its chat format, with one token per character."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final

import numpy as np

from meshrl.agents import Message, Tool
from meshrl.data import Batch, Ragged, Source
from meshrl.roles import GenerateCalls, ModelConfig, Sampler, Sampling
from meshrl.weights import Weights

END: Final = "\0"
"""Ends a turn."""
_TOOLS: Final = "tools: "
_ASSISTANT: Final = "assistant: "


class ScriptedChat:
    """Like `meshrl.agents.Chat`: one line per message, `user: hello`, and one for the available tools."""

    ends: frozenset[int] = frozenset({0})
    max_tokens = 1 << 20

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render the lines, and `assistant: `. A turn's end precedes each line except the first."""
        offered = [f"{_TOOLS}{json.dumps(list(tools))}{END}\n"] if tools else []
        lines = [f"{message.role}: {message.content}{END}\n" for message in messages]
        return "".join([*offered, *lines, _ASSISTANT])

    def encode(self, text: str) -> Sequence[int]:
        """Encode each character as its code point."""
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode the characters, without those that end a turn."""
        return "".join(map(chr, tokens)).replace(END, "")


def reply(text: str) -> str:
    """The answer of a good model to a conversation of `ScriptedChat`.

    It calls the first available tool, with the last message as each argument, and repeats the result. Without a tool it
    repeats the last message. It repeats a text that is no conversation, and answers nothing to an empty one.
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


def read_chat(_config: ModelConfig) -> ScriptedChat:
    """The chat format of models of the backend `fake`."""
    return ScriptedChat()


class ScriptedSampler(Sampler):
    """Says what a script says: a function of the prompt's text, or texts in order, followed by IndexError.

    Each text is a turn, followed by an end token if there is room for it. Log-probs are -0.5.
    """

    def __init__(self, script: Callable[[str], str] | Iterable[str]) -> None:
        self._script = script if callable(script) else _next_of(script)
        self._version = 0
        self._calls = GenerateCalls()
        self.asked: list[str] = []
        """The text of each prompt."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield row by row."""
        rows = prompts.repeat(sampling.n)
        async with self._calls.begin(sampling.beside) as call:
            for index in range(len(rows)):
                aborted = not await call.step()
                yield self._row(rows.select([index]), sampling, aborted)

    async def load(self, weights: Weights) -> Batch:
        """Give later texts this version."""
        async with self._calls.loading() as places:
            self._version = weights.version
        return places

    async def replay(self, record: Batch) -> None:
        """Repeat loads and aborts at their places in the record."""
        self._calls.replay(record)

    async def abort(self) -> None:
        """Let no running call say another text."""
        await self._calls.abort()

    def _row(self, row: Batch, sampling: Sampling, aborted: bool) -> Batch:
        had = "tokens" in row
        given = row.tokens[0].tolist() if had else list(map(ord, str(row.objects("prompt")[0])))
        said = "" if aborted else self._say("".join(map(chr, given)))
        whole = f"{said}{END}"
        for stop in sampling.stop:
            whole = whole[: whole.find(stop) + len(stop)] if stop in whole else whole
        most = int(row.row("max_tokens")[0]) if "max_tokens" in row else sampling.max_tokens
        tokens = [] if aborted else [ord(letter) for letter in whole[:most]]
        text = whole[:most].replace(END, "")
        for stop in sampling.stop:
            text = text.partition(stop)[0]
        size = len(given)
        columns = {
            "tokens": Ragged.of([[*given, *tokens]], np.int32),
            "loss_mask": Ragged.of([[False] * size + [True] * len(tokens)], np.bool_),
            "sampler_logprobs": Ragged.of([[0.0] * size + [-0.5] * len(tokens)], np.float32, source=Source("sampler")),
            "versions": Ragged.of([[-1] * size + [self._version] * len(tokens)], np.int32),
        }
        kept = row.drop(*(name for name in columns if name in row))
        return kept.assign(
            **columns,
            oldest_version=np.full(1, self._version, np.int32),
            completion=[text],
            temperature=np.ones(1, np.float32),
            truncated=np.array([len(whole) > most and not aborted]),
            aborted=np.array([aborted]),
        )

    def _say(self, prompt: str) -> str:
        self.asked.append(prompt)
        return self._script(prompt)


def _next_of(texts: Iterable[str]) -> Callable[[str], str]:
    left = list(texts)

    def say(_: str) -> str:
        return left.pop(0)

    return say
