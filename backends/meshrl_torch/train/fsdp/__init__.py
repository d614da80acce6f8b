"""The FSDP2 backend: a Hugging Face model sharded over the ranks of a mesh, and split over its axis `tp`.

Each rank is a process, so a mesh of several ranks needs `run.engine = "processes"`, or `"ray"`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from meshrl_torch import COUNTS, FLOPS, MASKS, MODELS, READS, TEXTS

__all__ = ["AXES", "COUNTS", "FLOPS", "MASKS", "MEMORY", "MODELS", "OPTIONS", "READS", "ROLES", "TEXTS"]

ROLES: Final[Mapping[str, str]] = {
    "Critic": "meshrl_torch.train.fsdp.roles:FsdpCritic",
    "Policy": "meshrl_torch.train.fsdp.roles:FsdpPolicy",
    "Reference": "meshrl_torch.train.fsdp.roles:FsdpReference",
    "Reward": "meshrl_torch.train.fsdp.roles:FsdpReward",
    "RewardModel": "meshrl_torch.train.fsdp.roles:FsdpRewardModel",
}
"""The class of each role. Strings, so that a look-up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = dict.fromkeys(ROLES, ("dp", "tp"))
"""The axes along which each role's ranks can be arranged, the last one fastest. Empty if it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(ROLES, "meshrl_torch.options:FsdpConfig")
"""The schema of each role's options: the table `fsdp` in the role's."""

MEMORY: Final = "meshrl_torch.estimate.memory:held_sharded"
"""Estimates the memory of a role's rank, without weights."""
