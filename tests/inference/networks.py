"""Small models that engines' kernels for CPUs know, in folders, and what is drawn from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from meshrl import Batch, PolicyConfig, Sampling, Weights, rollout
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_torch.weights.live_weights import LiveWeights
from tests.backends.material import by_row
from tests.senders import Senders

SHAPE: Mapping[str, Any] = {
    "vocab_size": 11, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "abc>", "d>"])
GREEDY = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
LONG = Sampling(max_tokens=1000, ignore_eos=True)
ENDLESS = Batch.of(prompt=["abc>"] * 8000, max_tokens=np.where(np.arange(8000) % 2, 1000, 50))
"""Rows for 260,000 steps, more than an engine makes while a test may last. Few end in a second, for slow readers."""
_TOKENIZER = character_tokenizer("abcdefgh>", 1024)
_IDS = [_TOKENIZER.encode(str(text)) for text in PROMPTS.objects("prompt")]


def saved(config: PretrainedConfig, seed: int, folder: Path) -> PreTrainedModel:
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    _TOKENIZER.save_pretrained(folder)
    return made


async def two(config: PretrainedConfig, folder: Path) -> tuple[list[PreTrainedModel], list[Weights]]:
    """Two networks, in the folders `0` and `1`, and their weights as a policy has them."""
    networks = [saved(config, seed, folder / str(seed)) for seed in range(2)]
    return networks, [await TorchPolicy(PolicyConfig(model=str(folder / str(seed)))).weights() for seed in range(2)]


def offer(senders: Senders, weights: Weights, version: int) -> LiveWeights:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.tensors.items()}
    return senders.offer(tensors, version, weights.probe)


async def drawn(sampler: EngineSampler) -> Batch:
    return await (await rollout(sampler, PROMPTS, GREEDY)).load()


async def completions(sampler: EngineSampler) -> list[list[int]]:
    batch = await drawn(sampler)
    return [tokens[mask.astype(np.bool_)].tolist() for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True)]


def greedy(network: PreTrainedModel, prompts: Sequence[list[int]] = _IDS) -> list[list[int]]:
    found: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = network.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)  # type: ignore[operator]
        found.append(out[0, len(prompt) :].tolist())
    return found


def distances(network: PreTrainedModel, batch: Batch) -> np.ndarray:
    """How far a sampler's log-probs of the tokens that it drew are from a network's, float[tokens]."""
    with torch.no_grad():
        known = torch.cat(by_row(network, batch)).numpy()
    apart: np.ndarray = np.abs(known - np.asarray(batch.sampler_logprobs.values))
    return apart[np.asarray(batch.loss_mask.values, np.bool_)]
