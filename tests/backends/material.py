"""What tests of backends share: small models, rows for them, and what transformers alone computes of each row."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl import Batch, ClippedLoss, Mesh, NewModel, Policy, Ragged, Weights
from meshrl.algo import TokenLoss
from meshrl.roles import OptimizerConfig

ModelOf: TypeAlias = Callable[..., str]
Warm: TypeAlias = Callable[[int], Awaitable[Mesh]]
Test = TypeVar("Test", bound=Callable[..., object])
MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
SHAPE: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
"""Of a configuration of transformers, for the tokenizer that `random_model` writes."""
GPT2: dict[str, Any] = {
    "vocab_size": 11, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
RANKS = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.process, pytest.mark.xdist_group("warm")]
SGD = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)
"""With so large an epsilon Adam's first step is nearly the gradient: weights differ by what gradients do."""


def on_ranks(test: Test) -> Test:
    for mark in RANKS:
        test = mark(test)
    return test


def changed(shape: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**shape, **keys}


def floats(array: np.ndarray[Any, Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def rollouts(rows: int = 14, prompts: int = 4, seed: int = 0) -> Batch:
    """Rows with shared prompts, and a few alone: prompt and completion of 1 to 9 tokens."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(2, 11, rng.integers(1, 9)) for _ in range(prompts)]
    pairs = [(heads[rng.integers(prompts)], rng.integers(1, 11, rng.integers(1, 10))) for _ in range(rows)]
    tokens = Ragged.of([np.concatenate(pair) for pair in pairs], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged.of([np.arange(len(a) + len(b)) >= len(a) for a, b in pairs], np.bool_),
        sampler_logprobs=Ragged(rng.normal(-2, 0.3, len(tokens.values)).astype(np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


def by_row(network: Any, batch: Batch, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of each row by transformers' own model and attention, one row at a time: 0 for the first token."""
    network.set_attn_implementation("eager")
    rows: list[Tensor] = []
    for tokens in batch.tokens:
        ids = torch.from_numpy(tokens.astype(np.int64))
        logprobs = (network(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]]))
    return rows


def norm_of(network: Any) -> float:
    gradients = [each.grad for each in network.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def near(found: Weights, expected: Weights, atol: float) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, array in expected.tensors.items():
        np.testing.assert_allclose(floats(found.tensors[name]), floats(array), rtol=0, atol=atol, err_msg=name)


async def updated(*policies: Policy, seed: int = 0) -> list[dict[str, float]]:
    return [dict((await each.update(rollouts(seed=seed), ClippedLoss())).means()) for each in policies]


class Watched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types it not
        self.calls: list[tuple[str, Sequence[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func._schema.name.removeprefix("aten::"), args))
        return func(*args, **(kwargs or {}))


class Counted(ClippedLoss):
    _calls: list[int] = PrivateAttr(default_factory=list)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        self._calls.append(len(logprobs))
        return super().__call__(logprobs, columns)


class Late(Counted):
    """Fails after the first micro-batch has left its gradient."""

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        judged = super().__call__(logprobs, columns)
        if len(self._calls) == 2:
            raise ZeroDivisionError
        return judged
