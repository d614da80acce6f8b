"""A row that reaches into the next one, by as little as a hundredth of a nat, is found in bfloat16 with its values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from meshrl import Batch, Policy, PolicyConfig, Ragged
from meshrl.errors import ModelError
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.loading import load
from meshrl_torch.model.mixers import Batches
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.one_rank import TorchPolicy
from tests.models.families import folder_of

ROWS = [[2, 3, 4, 5, 6, 7, 8, 9, 10], [2, 3, 4, 9, 9], [11, 12, 5], [2, 3, 4, 5, 8, *range(2, 22)]]


@dataclass
class Leak:
    """What is wrong in states of a dtype, and how much."""

    dtype: torch.dtype = torch.float32
    weight: float = 0.0


def attention(leak: Leak, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a segment sees the one before it."""
    own = Packed.__call__

    def leaking(self: Packed, *args: Any) -> Tensor:
        mixed = own(self, *args)
        if mixed.dtype != leak.dtype:
            return mixed
        lengths = torch.tensor([each.queries for each in self.groups for _ in range(each.count)])
        starts = lengths.cumsum(0)[:-1]
        reached = torch.zeros_like(mixed).index_copy(1, starts, mixed[:, starts - 1])
        return mixed + leak.weight * reached

    monkeypatch.setattr(Packed, "__call__", leaking)


def mixer(leak: Leak, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's window, or a recurrent state, goes on in the next segment."""
    own = Batches.call

    def leaking(self: Batches, forward: Callable[..., Any], args: Any, options: Any, known: Any) -> Any:
        apart = own(self, forward, args, options, known)
        states = next(each for each in (*args, *options.values()) if isinstance(each, Tensor))
        if states.dtype != leak.dtype or not leak.weight:
            return apart
        together = forward(*args, **options)
        if isinstance(apart, tuple):
            return (apart[0] + leak.weight * (together[0] - apart[0]), *apart[1:])
        return apart + leak.weight * (together - apart)

    monkeypatch.setattr(Batches, "call", leaking)


def positions(leak: Leak, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations depend on the highest position of a pass."""
    own = LlamaRotaryEmbedding.forward

    def leaking(self: LlamaRotaryEmbedding, states: Tensor, position_ids: Tensor) -> Any:
        if states.dtype == leak.dtype:
            return own(self, states, position_ids * (1 + leak.weight * position_ids.max()))
        return own(self, states, position_ids)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", leaking)


async def told(policy: Policy) -> np.ndarray[Any, Any]:
    batch = await policy.logprobs(Batch.of(tokens=Ragged.of(ROWS, np.int32)))
    return np.asarray(batch.ragged("logprobs").values, np.float64)


CASES = [
    ("llama", attention), ("qwen3_moe", attention), ("lfm2", mixer), ("nemotron_h", mixer), ("llama", positions),
    *(
        pytest.param(*each, marks=pytest.mark.wide)
        for each in (
            ("gpt_oss", attention), ("gemma2", attention), ("deepseek_v3", attention), ("nemotron_h", attention),
            ("granitemoe_swa", attention), ("phimoe", attention), ("jetmoe", attention), ("qwen3_5_text", mixer),
            ("falcon_mamba", mixer), ("minimax", mixer), ("kimi_linear", mixer), ("zamba2", mixer),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "place"), CASES)
async def test_a_small_leak_is_found(
    model_type: str,
    place: Callable[[Leak, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leak, folder = Leak(), folder_of(model_type, tmp_path)
    place(leak, monkeypatch)
    policy = TorchPolicy(PolicyConfig(model=folder))
    right = await told(policy)
    leak.weight = 1e-3
    nats = np.abs(await told(policy) - right).max()

    narrow = PolicyConfig(model=folder, dtype="bfloat16")
    leak.dtype, leak.weight = torch.bfloat16, 0.0
    assert load(narrow).layout.name == "packed"
    for size in (0.125, 0.0125):
        leak.weight = 1e-3 * size / nats
        layout = load(narrow).layout
        assert (layout.name, "see each other" in layout.why) == ("padded", True), size


async def test_all_trainers_pad_what_leaks_with_its_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak, folder = Leak(torch.bfloat16, 0.1), folder_of("llama", tmp_path)
    table = {"model": folder, "dtype": "bfloat16"}
    wanted = await told(TorchPolicy(PolicyConfig.model_validate({**table, "packing": "padded"})))
    attention(leak, monkeypatch)
    for kind in (TorchPolicy, FsdpPolicy):
        np.testing.assert_allclose(await told(kind(PolicyConfig.model_validate(table))), wanted, atol=1e-6)
        with pytest.raises(ModelError, match=r'see each other .* set packing = "auto"'):
            kind(PolicyConfig.model_validate({**table, "packing": "packed"}))
