"""How a model reads and writes a conversation: its tokenizer, its chat template, and the rendered messages.

A backend reads both from the model's folder: `read_chat(config.sampler)`. Messages have the form of OpenAI's protocol,
without fields that templates do not show.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, cast

import msgspec

from meshrl.errors import BackendError
from meshrl.roles import ModelConfig, function_of

Tool: TypeAlias = Mapping[str, object]
"""A tool as a request has it: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""

_ROLES: Final[Mapping[str, str]] = {"developer": "system"}
"""Roles that templates call by another name."""


class Function(msgspec.Struct, frozen=True):
    """The function that a tool call names. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an assistant's message."""

    id: str = ""
    type: str = "function"
    function: Function


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a conversation. Two messages are equal if a template shows them alike."""

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def shown(self) -> Mapping[str, object]:
        """The message as chat templates read it. Arguments of calls become values if they are valid JSON."""
        told: dict[str, object] = {"role": _ROLES.get(self.role, self.role), "content": self.content}
        if self.name is not None:
            told["name"] = self.name
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            told["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _value(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return told


class Chat(Protocol):
    """A tokenizer with a chat template."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a turn."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model supports, in tokens."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render the messages and the start of an assistant's turn. Raises DataError if the template refuses them."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Tokenise rendered text without adding special tokens. Raises DataError for text that cannot be encoded."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        ...


def read_chat(config: ModelConfig) -> Chat:
    """Read the tokenizer and chat template of a role's model.

    Raises ModelError if it has no chat template, and BackendError if its backend cannot converse.
    """
    read = function_of(config.backend, "CHAT")
    if read is None:
        raise BackendError(
            f"backend {config.backend!r} does not say how its models converse, so agents cannot talk to one: it needs "
            "`CHAT`, as docs/tour.md has it"
        )
    return cast("Callable[[ModelConfig], Chat]", read)(config)


def key_of_tools(tools: Sequence[Tool]) -> bytes:
    """The key of a conversation that has these tools and no messages yet."""
    return _digest(b"", list(tools))


def key_after(key: bytes, message: Message) -> bytes:
    """The key of a conversation with one more message."""
    return _digest(key, message.shown())


def _digest(key: bytes, value: object) -> bytes:
    # Sorted and in ASCII, which can encode half a surrogate pair too.
    return hashlib.blake2b(key + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _value(arguments: str) -> object:
    """The parsed JSON, or the text itself if it is not valid JSON."""
    try:
        return cast("object", json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments
