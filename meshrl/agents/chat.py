"""How a model reads and writes a conversation: its tokenizer, its chat template, the messages, and its tool calls."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from meshrl.agents.formats import CallForm, calls_in, without_channels
from meshrl.data import Constraint, Masks
from meshrl.errors import BackendError, DataError, ModelError
from meshrl.roles import ModelConfig, backends_with, function_of, masks_of, takes_images

Tool: TypeAlias = Mapping[str, object]
"""A tool as a request has it: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""

ROLES: Final[Mapping[str, str]] = {"developer": "system"}
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

    def shown(self, *, as_text: bool = False) -> Mapping[str, object]:
        """The message as chat templates read it. Arguments of calls become values if they are valid JSON.

        `as_text`: they stay text, for templates that put them between other texts.
        """
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments if as_text else _value(arguments)},
            }
            for call in self.tool_calls
            for arguments in [call.function.arguments]
        ]
        shown = {
            "role": ROLES.get(self.role, self.role),
            "content": self.content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }
        return {name: value for name, value in shown.items() if value is not None}


class Chat(Protocol):
    """A tokenizer with a chat template."""

    backends: tuple[str, str]
    """The sampler's backend, and that of the policy that learns from what is drawn, or ""."""

    @property
    def calls(self) -> CallForm:
        """How the model writes a call. Raises DataError if it writes none that could be read."""
        ...

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a turn."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model supports, in tokens."""
        ...

    @property
    def native_tokens(self) -> int:
        """The longest sequence with the model's native positions. Longer ones have others from their first token on."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render the messages and the start of an assistant's turn. Raises DataError if the template refuses them."""
        ...

    def encode(self, text: str, after: Sequence[int] = ()) -> Sequence[int]:
        """Tokenise rendered text that continues tokens, without adding special tokens.

        Raises DataError for text that cannot be encoded.
        """
        ...

    def begin(self, text: str) -> Sequence[int]:
        """Tokenise a prompt without messages, after what the tokenizer puts before a text. Raises as `encode` does."""
        ...

    def decode(self, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
        """The text of tokens that continue others, with special tokens by name, without those that end a turn."""
        ...

    def check(self, constraint: Constraint) -> None:
        """Raise DataError if no answer can be held to a constraint, such as one with a wrong schema."""
        ...


@runtime_checkable
class SeeingChat(Protocol):
    """What the chat of a model that sees images has besides."""

    unseen: str
    """Why the sampler takes no images for its model. Empty if it takes some."""

    @property
    def sees(self) -> bool:
        """True if the model sees images."""
        ...

    def see(self, images: Mapping[str, bytes]) -> Sequence[object]:
        """Read images in another thread. `render_seeing` need not read them again while what this returns is held.

        Raises DataError as it does.
        """
        ...

    def render_seeing(self, messages: Sequence[Message], tools: Sequence[Tool], images: Mapping[str, bytes]) -> str:
        """Render like `Chat.render`, with what stands for the images that messages name.

        Raises DataError too if the model sees none, or one cannot be read.
        """
        ...


def check_constraint(chat: Chat, constraint: Constraint) -> None:
    """Raise DataError if the model's answers cannot be held to a constraint, or the policy cannot learn from them."""
    sampler, trainer = chat.backends
    masks, answers = masks_of(sampler), "an answer is not held to a schema, a call or another constraint"
    if masks == "none":
        raise DataError(f"{answers}: the backend {sampler!r} cannot do it. {_other('Sampler', 'served', 'trained')}")
    if trainer and masks != "trained":
        raise DataError(
            f"{answers}: the backend {sampler!r} masks by rules of its own, so the policy would learn from log-probs "
            f"that it cannot compute. {_other('Sampler', 'trained')}, or record without training"
        )
    if trainer and masks_of(trainer) != "trained":
        raise DataError(
            f"{answers}: the policy's backend {trainer!r} computes log-probs without masks. "
            f"{_other('Policy', 'trained')}"
        )
    if masks == "plain" and not constraint.is_plain:
        raise DataError(
            f"{answers}: by the backend {sampler!r}, an answer can have one schema, expression or list of choices, "
            f"without calls of tools and without an open thought. {_other('Sampler', 'served', 'trained')}"
        )
    chat.check(constraint)


def check_images(chat: Chat) -> None:
    """Raise DataError if the sampler or the policy takes no images."""
    for role, backend in zip(("Sampler", "Policy"), chat.backends, strict=True):
        if backend and not takes_images(backend):
            others = " or ".join(json.dumps(name) for name in backends_with(role) if takes_images(name))
            raise DataError(
                f"the conversation has images, and the {role.lower()}'s backend {backend!r} takes none: use "
                f"{role.lower()}.backend = {others}, or send text alone"
            )
    if isinstance(chat, SeeingChat) and chat.unseen:
        raise DataError(f"the conversation has images: {chat.unseen}, or send text alone")


def _other(role: str, *masks: Masks) -> str:
    """What to set instead: a backend with this role and one of these masks."""
    names = [name for name in backends_with(role) if masks_of(name) in masks]
    return f"Use {role.lower()}.backend = {' or '.join(map(json.dumps, names))}"


def read_chat(config: ModelConfig, policy: ModelConfig | None = None) -> Chat:
    """Read the tokenizer and chat template of a role's model.

    `policy`: the table of the policy that learns from what is drawn, which says what the gateway refuses. Raises
    ModelError if it has no chat template, and BackendError if its backend cannot converse.
    """
    read = function_of(config.backend, "CHAT")
    if read is None:
        raise BackendError(
            f"backend {config.backend!r} does not say how its models converse, so agents cannot talk to one: it needs "
            "`CHAT`, as docs/tour.md has it"
        )
    chat = cast("Callable[[ModelConfig], Chat]", read)(config)
    chat.backends = config.backend, policy.backend if policy else ""
    if isinstance(chat, SeeingChat) and (check := function_of(config.backend, "SEES")):
        try:
            check(config)
        except ModelError as error:
            chat.unseen = str(error)
    return chat


def key_after(key: bytes, value: object) -> bytes:
    """The key of a conversation that continues with a value: the list of tools first, then the gist of each message."""
    # Sorted and in ASCII, which can encode half a surrogate pair too.
    return hashlib.blake2b(key + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _value(arguments: str) -> object:
    """The parsed JSON, or the text itself if it is not valid JSON."""
    try:
        return cast("object", json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def message_of(text: str, tools: Sequence[Tool], new_id: Callable[[], str], *, is_whole: bool = True) -> Message:
    """The model's text as a client's message, with calls separated. If a call cannot be read, all stays text.

    `is_whole`: False if the text was cut, perhaps within a call.
    """
    rest, written = calls_in(text, tools, is_whole=is_whole) if tools else (text, ())
    calls = [ToolCall(id=own or new_id(), function=Function(name, given)) for name, given, own in written]
    return Message("assistant", without_channels(rest), tool_calls=tuple(calls))
