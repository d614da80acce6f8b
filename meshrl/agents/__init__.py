"""Agents: programs that talk to the model through an OpenAI-compatible server, and learn token for token.

A `Conversation` is what such a program's requests come to: the ids that each prompt holds, which are those that were
sampled before, and the rows that are trained on.
"""

from meshrl.agents.chat import Chat, Function, Message, Tool, ToolCall, read_chat
from meshrl.agents.conversation import Conversation, Drawn, Prompt, Turn

__all__ = [
    "Chat",
    "Conversation",
    "Drawn",
    "Function",
    "Message",
    "Prompt",
    "Tool",
    "ToolCall",
    "Turn",
    "read_chat",
]
