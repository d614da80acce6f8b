"""What tests of backends share: small models, rows for them, and what transformers alone computes of each row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl import Batch, NewModel, OptimizerConfig, Ragged

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "bos_token_id": None,
    "eos_token_id": 1,
}
"""Of a configuration of transformers, for the tokenizer that `random_model` writes."""
SGD = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)
"""With so large an epsilon Adam's first step is nearly the gradient: weights differ by what gradients do."""


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
    """The norm of all gradients of a model."""
    gradients = [each.grad for each in network.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def columns_of(batch: Batch, names: Sequence[str], row: int) -> dict[str, Tensor]:
    """Ragged columns of one row, as a loss is given them."""
    return {name: torch.from_numpy(batch.ragged(name)[row].copy()) for name in names}
