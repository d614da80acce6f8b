"""The Megatron backend: a model of Megatron-Core, split over a mesh's axes `tp`, `cp`, `pp` and `dp`.

Each rank is a process of its own, so a mesh of several ranks needs `run.engine = "processes"`, or `"ray"`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "COUNTS", "MEMORY", "MODELS", "OPTIONS", "ROLES"]

MODELS: Final = "read"

ROLES: Final[Mapping[str, str]] = {
    "Critic": "meshrl_megatron.critic:MegatronCritic",
    "Policy": "meshrl_megatron.policy:MegatronPolicy",
    "Reference": "meshrl_megatron.reference:MegatronReference",
    "Reward": "meshrl_megatron.reward:MegatronReward",
    "RewardModel": "meshrl_megatron.reward_model:MegatronRewardModel",
}
"""Where each role's class is. Strings, so that looking a role up imports neither torch nor Megatron."""

AXES: Final[Mapping[str, Sequence[str]]] = dict.fromkeys(ROLES, ("dp", "pp", "cp", "tp"))
"""The axes that each role's ranks may stand along, the last one fastest; none where it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(ROLES, "meshrl_megatron.options:MegatronConfig")
"""Where the schema of each role's own options is: the table `megatron` in the role's."""

COUNTS: Final = "meshrl_hf.prompts:count_prompts"
"""Tells the tokens of prompts, without a model."""

MEMORY: Final = "meshrl_megatron.memory:held"
"""Tells what a rank holds of a role, without weights."""
