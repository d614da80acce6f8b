"""Hugging Face models on torch, packed: the backends `torch` and `fsdp`, and what other trainers and samplers share.

`model` reads a table's model and computes log-probs of rows. `train` makes its steps: on one rank, which is the backend
`torch`, or over several (`train.fsdp`, the backend `fsdp`). `sample` generates, `checkpoint` saves and restores,
`weights` publishes by `wire`, `ranks` joins the ranks of a mesh, and `estimate` counts memory and operations.
"""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "ENDS", "FLOPS", "MASKS", "MEMORY", "MODELS", "READS", "ROLES", "TEXTS"]

MODELS: Final = "read"

ROLES: Final[Mapping[str, str]] = {
    "Critic": "meshrl_torch.train.one_rank:TorchCritic",
    "Policy": "meshrl_torch.train.one_rank:TorchPolicy",
    "Reference": "meshrl_torch.train.one_rank:TorchReference",
    "Reward": "meshrl_torch.train.one_rank:TorchReward",
    "RewardModel": "meshrl_torch.train.one_rank:TorchRewardModel",
    "Sampler": "meshrl_torch.sample.sampler:TorchSampler",
}
"""The class of each role. Strings, so that a look-up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = dict.fromkeys(("Critic", "Policy", "RewardModel"), ())
"""The axes along which each role's ranks can be arranged, the last one fastest. Empty if it takes one rank."""

CHAT: Final = "meshrl_torch.model.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_torch.model.chat:count_rows"
"""Counts the tokens of prompts, without a model."""

ENDS: Final = "meshrl_torch.model.chat:find_ends"
"""Says why completions may never end, without a model."""

FLOPS: Final = "meshrl_torch.estimate.flops:flops_of"
"""Counts the operations of a pass over a row, without a model."""

MASKS: Final = "trained"
"""Answers are held to any constraint, and trained on under its mask."""

MEMORY: Final = "meshrl_torch.estimate.memory:held"
"""Estimates the memory of a role's rank, without weights."""

READS: Final = "meshrl_torch.estimate.reading:reads"
"""Says how a role's model reads rows, without its values."""

TEXTS: Final = "meshrl_torch.model.texts:read_texts"
"""Gives the text of each token, without a model."""
