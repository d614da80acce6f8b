"""Small models that vLLM's kernels for CPUs know, in folders, and what is drawn from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from meshrl import Batch, SamplerConfig, Sampling, rollout, with_options
from meshrl_hf.text import character_tokenizer
from meshrl_vllm.options import VllmConfig
from meshrl_vllm.sampler import VllmSampler

SHAPE: Mapping[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "abc>", "d>"])
TOKENIZER = character_tokenizer("abcdefgh>", 256)


def saved(config: PretrainedConfig, seed: int, folder: Path) -> PreTrainedModel:
    """A network far from its initialisation, and in a folder."""
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return made


def config_of(
    folder: Path, python: str | None, options: Mapping[str, object] | None = None, **keys: Any
) -> SamplerConfig:
    """The table of a sampler of this folder's model. `options`: of vLLM."""
    own = VllmConfig.model_validate({"python": python, "kv_cache_mib": 32, **(options or {})})
    return with_options(SamplerConfig(backend="vllm", model=str(folder), slots=16, **keys), own)


async def drawn(sampler: VllmSampler) -> Batch:
    """Greedy completions."""
    return await (await rollout(sampler, PROMPTS, Sampling(max_tokens=20, temperature=0, ignore_eos=True))).load()
