"""Agents: programs that talk to the model through an OpenAI-compatible server, and learn token for token.

A `Conversation` is what such a program's requests come to: the ids that each prompt holds, which are those that were
sampled before, and the rows that are trained on. The `Gateway` is the server, before any sampler; it needs
`pip install 'meshrl[agents]'`, and is loaded when it is asked for.
"""

from typing import TYPE_CHECKING, Final

from meshrl.agents.chat import Chat, Function, Message, Tool, ToolCall, read_chat
from meshrl.agents.conversation import Conversation, Drawn, Prompt, Turn

__all__ = [
    "Chat",
    "Conversation",
    "Drawn",
    "Function",
    "Gateway",
    "GatewayConfig",
    "Message",
    "Prompt",
    "Session",
    "Tool",
    "ToolCall",
    "Turn",
    "read_chat",
]

if TYPE_CHECKING:
    from meshrl.agents.gateway import Gateway, GatewayConfig, Session
else:
    from importlib import import_module

    from meshrl.errors import BackendError

    _SERVED: Final = {"Gateway": "gateway", "GatewayConfig": "gateway", "Session": "gateway"}
    """What needs the extra, and where it is."""

    def __getattr__(name: str) -> object:
        if name not in _SERVED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"meshrl.agents.{_SERVED[name]}"), name)
        except ModuleNotFoundError as error:
            raise BackendError(
                f"meshrl.agents.{name} needs the package {error.name!r}, which is not installed: pip install "
                "'meshrl[agents]'"
            ) from error
