"""What a message means, whatever its spelling: clients rewrite a history before they send it back.

They move the model's thoughts to a separate field or drop them, add names, change the spaces around a text, write
the arguments of calls in another order, and give calls other ids. `difference` compares a message of a history with
the recorded one, and says what differs in meaning.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec

from meshrl.agents.chat import ROLES, Message, key_after

_TAG: Final = re.compile(r"(?:[<◁]|\[(?=/?THINK\]))(/?)(?i:(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning))[>▷\]]")
"""Begins or ends a thought."""
Difference: TypeAlias = tuple[str, str, str]
"""A part of a message that differs in meaning: its name, the recorded value and the one that was sent."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """The normal form of a message."""

    message: Message
    role: str
    texts: tuple[str, ...]
    """The texts between thoughts, without outer spaces."""
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each call. Arguments are JSON in one spelling."""
    answers: int | None
    """Number of the call in the history that a tool's message answers. None if no call has its id."""
    gist: str
    """Key of what no client leaves out or adds. Messages that mean the same have the same gist."""

    @property
    def text(self) -> str:
        """The text without thoughts."""
        return "\n\n".join(self.texts)

    @property
    def ids(self) -> list[str]:
        """The ids of its calls."""
        return [call.id for call in self.message.tool_calls]

    def as_said(self, said: "Meaning") -> "Meaning":
        """This message with the text and the thoughts of the recorded one."""
        message = msgspec.structs.replace(self.message, content=said.message.content)
        return replace(self, message=message, texts=said.texts, thoughts=said.thoughts, gist=said.gist)


def meanings_of(messages: Sequence[Message]) -> Sequence[Meaning]:
    """The normal form of each message of a history."""
    numbers: dict[str, int] = {}
    count, found = 0, list[Meaning]()
    for message in messages:
        role = ROLES.get(message.role, message.role)
        texts, thoughts = split_thoughts(message.content) if role == "assistant" else ([message.content], "")
        calls = tuple((call.function.name, _in_one_spelling(call.function.arguments)) for call in message.tool_calls)
        answers = numbers.get(message.tool_call_id or "")
        parts = tuple(filter(None, map(str.strip, texts)))
        gist = key_after(b"", [role, _squeezed("".join(parts)), calls]).hex()
        found.append(Meaning(message, role, parts, thoughts, calls, answers, gist))
        numbers |= {call.id: count + place for place, call in enumerate(message.tool_calls) if call.id}
        count += len(calls)
    return found


def split_thoughts(text: str) -> tuple[Sequence[str], str]:
    """Return the texts outside of thoughts, and the thoughts. A thought without an end counts as text."""
    pieces = pieces_of(text)
    thoughts = " ".join(piece for piece, is_thought in pieces if is_thought)
    return [piece for piece, is_thought in pieces if not is_thought], " ".join(thoughts.split())


def pieces_of(text: str) -> Sequence[tuple[str, bool]]:
    """The texts and thoughts that make up a text, in order, and whether each is a thought.

    They have no tags. A thought without an end counts as text.
    """
    found, inside, open_piece = list[tuple[str, bool]](), False, ""
    pieces = _TAG.split(text)
    for piece, tag in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        open_piece += piece
        if tag == "/" and (inside or not found):  # the first thought may lack its beginning
            found.append((open_piece, True))
            inside, open_piece = False, ""
        elif tag == "" and not inside:
            found.append((open_piece, False))
            inside, open_piece = True, ""
    return [*found, (open_piece, False)]


def thought_end(text: str) -> str:
    """Return the tag that ends the thought with which a text ends. "" if it ends with none, or in its midst."""
    tags = list(_TAG.finditer(text))
    is_open = tags and not tags[-1].group(1) and not text[tags[-1].end() :].strip()
    return f"{tags[-1].group()[0]}/{tags[-1].group()[1:]}" if is_open else ""


def difference(recorded: Meaning, sent: Meaning) -> Difference | None:
    """Return the first difference in meaning, None if there is none.

    What one side leaves out does not differ: thoughts that a client drops, and names and ids that only one has.
    """
    return next((each for each in _compared(recorded, sent) if each[1] != each[2]), None)


def added_to(said: Meaning, sent: Meaning, unseen: str) -> str | None:
    """Return what a client has added to an answer, from a new line on. None if this is another message.

    Clients such as smolagents join their own message to the model's. `unseen`: the text that stopped the answer, which
    a client may write itself.
    """
    if difference(said, sent) is None:
        return ""
    if difference(said, replace(sent, texts=said.texts)) is not None or not sent.text.startswith(said.text):
        return None
    rest, stop = sent.text[len(said.text) :], unseen.strip()
    rest = rest.lstrip().removeprefix(stop) if stop and rest.lstrip().startswith(stop) else rest
    return rest.strip() if not rest.strip() or (rest.startswith("\n") and not said.calls) else None


def _compared(recorded: Meaning, sent: Meaning) -> Iterator[Difference]:
    yield "role", recorded.role, sent.role
    if len(recorded.texts) == len(sent.texts) or _squeezed(recorded.text) != _squeezed(sent.text):
        yield "content", recorded.text, sent.text
    names = [[name for name, _ in each.calls] for each in (recorded, sent)]
    yield "tool_calls", ", ".join(names[0]), ", ".join(names[1])
    for place, ((_, before), (_, after)) in enumerate(zip(recorded.calls, sent.calls, strict=False)):
        yield f"tool_calls[{place}].function.arguments", before, after
    if recorded.thoughts and sent.thoughts and _squeezed(recorded.thoughts) != _squeezed(sent.thoughts):
        yield "thoughts", recorded.thoughts, sent.thoughts
    if recorded.message.name and sent.message.name:
        yield "name", recorded.message.name, sent.message.name
    if recorded.answers is not None and sent.answers is not None:
        yield "tool_call_id", f"call {recorded.answers}", f"call {sent.answers}"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _in_one_spelling(arguments: str) -> str:
    """Arguments as JSON with sorted keys. A text that is not JSON stays."""
    try:
        value = json.loads(arguments or "null", parse_float=_number)
        return json.dumps({} if value is None else value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
