"""Agents: programs that talk to the model through an OpenAI-compatible server, and learn token for token.

A `Conversation` turns such a program's requests into rows to train on. Its prompts hold the ids that were sampled
before. The `Gateway` is the server in front of any sampler. An `Agent` plays episodes, each a program's work on one row
of a task. `Agents` is a sampler of such episodes for a stream. `record` keeps what programs say to a served model,
without training. These need `pip install 'meshrl[agents]'` and are loaded on first use.
"""

from typing import TYPE_CHECKING, Final

from meshrl.agents.batcher import Answer, RequestBatcher
from meshrl.agents.chat import (
    Chat,
    Function,
    Message,
    Tool,
    ToolCall,
    check_constraint,
    read_chat,
)
from meshrl.agents.config import AgentConfig, load_agent, load_reward
from meshrl.agents.conversation import Conversation, Drawn, Prompt, Transcript, Turn
from meshrl.agents.formats import NAME, CallForm, families, form_of

__all__ = [
    "NAME",
    "Agent",
    "AgentConfig",
    "Agents",
    "Answer",
    "CallForm",
    "Chat",
    "Conversation",
    "Drawn",
    "Episode",
    "Function",
    "Gateway",
    "GatewayConfig",
    "Message",
    "Prompt",
    "Recording",
    "RequestBatcher",
    "Session",
    "Tool",
    "ToolCall",
    "Transcript",
    "Turn",
    "check_constraint",
    "conversations",
    "families",
    "form_of",
    "load_agent",
    "load_reward",
    "read_chat",
    "record",
    "recorded",
]

if TYPE_CHECKING:
    from meshrl.agents.agent import Agent, Episode
    from meshrl.agents.gateway import Gateway, GatewayConfig, Session
    from meshrl.agents.recording import Recording, record, recorded
    from meshrl.agents.sampler import Agents, conversations
else:
    from importlib import import_module

    from meshrl.errors import BackendError

    _MODULES: Final = {
        "agent": "Agent Episode",
        "gateway": "Gateway GatewayConfig Session",
        "recording": "Recording record recorded",
        "sampler": "Agents conversations",
    }
    _SERVED: Final = {name: module for module, names in _MODULES.items() for name in names.split()}
    """Names that need the extra, each with its module."""

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
