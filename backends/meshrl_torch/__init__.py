"""The plain torch backend: each role holds a whole Hugging Face model on one rank, for a laptop or a test."""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "FLOPS", "MEMORY", "MODELS", "ROLES"]

MODELS: Final = "read"

ROLES: Final[Mapping[str, str]] = {
    "Critic": "meshrl_torch.critic:TorchCritic",
    "Policy": "meshrl_torch.policy:TorchPolicy",
    "Reference": "meshrl_torch.reference:TorchReference",
    "Reward": "meshrl_torch.reward:TorchReward",
    "RewardModel": "meshrl_torch.reward_model:TorchRewardModel",
    "Sampler": "meshrl_torch.sampler:TorchSampler",
}
"""The class of each role. Strings, so that a look-up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = dict.fromkeys(("Critic", "Policy", "RewardModel"), ())
"""The axes along which each role's ranks can be arranged, the last one fastest. Empty if it takes one rank."""

CHAT: Final = "meshrl_hf.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_hf.prompts:count_prompts"
"""Counts the tokens of prompts, without a model."""

FLOPS: Final = "meshrl_hf.flops:flops_of"
"""Counts the operations of a pass over a row, without a model."""

MEMORY: Final = "meshrl_torch.memory:held"
"""Estimates the memory of a role's rank, without weights."""
