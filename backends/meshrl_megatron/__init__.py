"""The Megatron backend: a model of Megatron-Core, split over a mesh's axes `tp`, `cp`, `pp` and `dp`.

Each rank is a process, so a mesh of several ranks needs `run.engine = "processes"`, or `"ray"`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from meshrl_torch import COUNTS, FLOPS, MODELS, TEXTS

__all__ = ["AXES", "BLIND", "COUNTS", "FLOPS", "MEMORY", "MODELS", "OPTIONS", "READS", "ROLES", "TEXTS"]

ROLES: Final[Mapping[str, str]] = {
    "Critic": "meshrl_megatron.roles:MegatronCritic",
    "Policy": "meshrl_megatron.roles:MegatronPolicy",
    "Reference": "meshrl_megatron.roles:MegatronReference",
    "Reward": "meshrl_megatron.roles:MegatronReward",
    "RewardModel": "meshrl_megatron.roles:MegatronRewardModel",
}
"""The class of each role. Strings, so that a look-up imports neither torch nor Megatron."""

AXES: Final[Mapping[str, Sequence[str]]] = dict.fromkeys(ROLES, ("dp", "pp", "cp", "tp"))
"""The axes along which each role's ranks can be arranged, the last one fastest. Empty if it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(ROLES, "meshrl_megatron.options:MegatronConfig")
"""The schema of each role's options: the table `megatron` in the role's."""

MEMORY: Final = "meshrl_megatron.memory:held"
"""Estimates the memory of a role's rank, without weights."""

READS: Final = "meshrl_megatron.shape:reads"
"""Says how a role's model reads rows, without its values."""

BLIND: Final = True
"""It takes no images."""
