"""What the megatron backend tells of memory before a run, against what torch's profiler counts over gloo."""

import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3MoeConfig

from meshrl import Actor, ClippedLoss, Gather, Mesh, PolicyConfig, endpoint
from meshrl.mesh import Same
from meshrl.roles import Work, memory_of
from meshrl_megatron.roles import MegatronPolicy
from tests.backends.material import RANKS_OF_MEGATRON, ModelOf
from tests.backends.test_memory import COMPLETION, PROMPT, ROWS, N, most, rollouts, told

pytestmark = RANKS_OF_MEGATRON

SIZES: Mapping[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": 2000, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": Qwen3Config(**SIZES, intermediate_size=320),
    "experts": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=4, norm_topk_prob=True
    ),
}
CASES: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "dp": ("dense", {"dp": 4}, {}),
    "cp": ("dense", {"dp": 2, "cp": 2}, {}),
    "pp and tp": ("dense", {"dp": 1, "pp": 2, "tp": 2}, {"dtype": "bfloat16"}),
    "virtual stages": ("dense", {"dp": 2, "pp": 2}, {"megatron": {"virtual_stages": 2}}),
    "tp, recomputed": ("dense", {"dp": 2, "tp": 2}, {"activation_checkpointing": True, "dtype": "bfloat16"}),
    "experts": ("experts", {"dp": 2, "tp": 2}, {"megatron": {"experts": 2}}),
}
RARE = ["dp", "cp", "virtual stages", "tp, recomputed"]


class Measured(Actor):
    """A rank of a policy, and a process that is in no group."""

    @endpoint
    async def taken(self, config: PolicyConfig, rows: int) -> Gather[np.ndarray]:
        """The most bytes that two updates take, from the policy's making on."""
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            policy = MegatronPolicy(config)
            for _ in range(2):
                await policy.update(rollouts(rows), ClippedLoss())
        return np.array([most(profiled)])

    @endpoint
    async def before(self, config: PolicyConfig, work: Work) -> Same[int]:
        """What is told of a policy before it is made."""
        return told(memory_of(config, work))


@pytest.mark.parametrize(
    "cases", [["pp and tp", "experts"], pytest.param(RARE, marks=pytest.mark.wide)], ids=["covering", "others"]
)
async def test_a_split_policys_memory_is_told_within_a_tenth(
    warm: Callable[[int], Awaitable[Mesh]], model_of: ModelOf, cases: Sequence[str]
) -> None:
    """Of the rank that took most; with experts of the mean, as their load is uneven."""
    four, apart = await warm(4), dict[str, tuple[int, int]]()
    teller = await (await warm(1)).spawn(Measured)
    folders = {name: model_of(shape, noise=0) for name, shape in MODELS.items()}
    for case in cases:
        model, axes, changes = CASES[case]
        table = {"model": folders[model], "backend": "megatron", "micro_batch_tokens": 500, **changes}
        config = PolicyConfig.model_validate(table)
        before = await teller.before(config, Work(axes, PROMPT, COMPLETION, ROWS, N, gpu=0))
        taken = await (await four.shape(**axes).spawn(Measured)).taken(config, ROWS // axes["dp"])
        measured = int(np.mean(taken) if model == "experts" else np.max(taken))
        if before != pytest.approx(measured, rel=0.1):
            apart[case] = before, measured
    assert not apart, "told, and measured"
