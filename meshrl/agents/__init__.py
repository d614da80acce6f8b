"""Agents: programs that talk to the model through an OpenAI-compatible server, and learn token for token.

A `Conversation` turns such a program's requests into rows to train on. Its prompts hold the ids that were sampled
before. The `Gateway` is the server in front of any sampler. An `Agent` plays episodes, each a program's work on one row
of a task. `Agents` is a sampler of such episodes for a stream. `record` keeps what programs say to a served model,
without training. These need `pip install 'meshrl[agents]'` and are loaded on first use.
"""

from typing import TYPE_CHECKING, Final

from meshrl.agents.batcher import Answer as Answer, RequestBatcher as RequestBatcher
from meshrl.agents.chat import (
    Chat as Chat,
    Function as Function,
    Message as Message,
    Tool as Tool,
    ToolCall as ToolCall,
    check_constraint as check_constraint,
    read_chat as read_chat,
)
from meshrl.agents.config import AgentConfig as AgentConfig, load_agent as load_agent, load_reward as load_reward
from meshrl.agents.conversation import (
    Conversation as Conversation,
    Drawn as Drawn,
    Prompt as Prompt,
    Transcript as Transcript,
    Turn as Turn,
)
from meshrl.agents.formats import NAME as NAME, CallForm as CallForm, families as families, form_of as form_of

if TYPE_CHECKING:
    from meshrl.agents.agent import Agent as Agent, Episode as Episode
    from meshrl.agents.gateway import Gateway as Gateway, GatewayConfig as GatewayConfig, Session as Session
    from meshrl.agents.recording import Recording as Recording, record as record, recorded as recorded
    from meshrl.agents.sampler import Agents as Agents, conversations as conversations
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
