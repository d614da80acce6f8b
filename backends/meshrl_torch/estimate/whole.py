"""The memory of a rank of the torch backend, all of it on the host."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Final

from torch import nn

from meshrl.errors import ConfigError
from meshrl.roles import (
    CriticConfig,
    Memory,
    ModelConfig,
    PolicyConfig,
    RewardTrainingConfig,
    SamplerConfig,
    Term,
    Work,
)
from meshrl_torch.estimate.memory import Cast, cache_per_token, figures, knobs, part_of
from meshrl_torch.model.loading import config_of
from meshrl_torch.model.lora import adapt
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.sample.decoder import GROWTH, PREFILL_TOKENS
from meshrl_torch.train.optimizer import Optimizer

_MADE: Final = 3
"""Copies of a step's logits: the logits, the probabilities, and their cumulative sums."""


def held(config: ModelConfig, work: Work) -> Memory:
    """Estimate the memory of a role's rank: the whole model, and what training or sampling adds."""
    here = replace(work, gpu=0)
    if isinstance(config, SamplerConfig):
        return _sampler(config, here)
    trains = isinstance(config, PolicyConfig | CriticConfig | RewardTrainingConfig)
    if trains and prod(work.axes.values()) > 1:
        raise ConfigError(
            f"the backend 'torch' trains on one rank, but the mesh {config.mesh!r} has {dict(work.axes)}: take "
            'backend = "fsdp", or one rank'
        )
    budget = int(getattr(config, "micro_batch_tokens", 1))
    found = figures(config, here, budget, partial(_laid_out, config))
    return Memory(found.terms("update" if trains else "score", host=True), knobs(config))


def _laid_out(config: ModelConfig, model: LanguageModel) -> Cast:
    part = part_of(config, model)
    root = nn.ModuleList([part.model.network, *part.extra])
    parameters = part.parameters
    if parameters is None or not isinstance(config, PolicyConfig | CriticConfig | RewardTrainingConfig):
        return Cast(root, part.predict)
    optimizer = config.optimizer
    return Cast(root, part.predict, lambda: Optimizer(optimizer, list(parameters())).masters)


def _sampler(config: SamplerConfig, work: Work) -> Memory:
    """The model, the slots for its rows, and the longest pass over prompts."""
    prompts = replace(work, completion=1, rows=-(-work.rows // work.n), n=1)

    def laid_out(model: LanguageModel) -> Cast:
        adapt(model, config.lora, config.seed)
        return Cast(model.network, lambda _, micro: model.hidden(micro.ids, micro.positions, micro.attend))

    found = figures(config, prompts, PREFILL_TOKENS, laid_out)
    shape = config_of(config).get_text_config()
    slots = min(config.slots, work.own_rows)
    positions = -(-(work.tokens + 1) // GROWTH) * GROWTH
    cache = slots * positions * cache_per_token(shape, config.dtype)
    logits = _MADE * slots * int(shape.vocab_size) * 4
    terms = [
        Term("parameters", found.parameters, "", "each parameter and buffer, in the table's dtype", host=True),
        Term("KV cache", cache, "", f"{slots} slots of {positions} positions, kept between calls", host=True),
        Term("logits", logits, "generate", f"{slots} slots, {_MADE} times float32 of the vocabulary", host=True),
        Term("prefill", found.head, "generate", f"a pass over {PREFILL_TOKENS} tokens of prompts at most", host=True),
    ]
    return Memory(terms, [f"slots={max(1, slots // 2)}", *knobs(config)])
