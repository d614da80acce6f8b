"""The memory of an engine's rank: weights, and a KV cache in the rest of its share of a GPU."""

from math import prod
from typing import Final, cast

import torch
from transformers import PretrainedConfig

from meshrl.errors import ConfigError
from meshrl.roles import MemoryEstimate, MemoryTerm, SamplerConfig, Workload, options_of
from meshrl_inference.engine_side.protocol import CPU_CACHE_MIB
from meshrl_inference.options import EngineOptions
from meshrl_torch.estimate.flops import cache_per_token
from meshrl_torch.model.loading import config_of, without_values
from meshrl_torch.wire import fp8

MIB: Final = 2**20
_PASS: Final = 8192
"""Approximate number of tokens in one pass of an engine."""


def estimate(config: SamplerConfig, work: Workload) -> MemoryEstimate:
    """Estimate what a rank holds: an engine takes it at its start and keeps it, unless it sleeps.

    ConfigError if the model and its passes leave no memory of the share for the KV cache.
    """
    options = options_of(config, EngineOptions)
    shape = config_of(config)
    text = shape.get_text_config()
    tp = work.axes.get("tp", 1)
    itemsize = cast("torch.dtype", getattr(torch, config.dtype)).itemsize
    weights = weight_bytes(shape, itemsize, options.quantized) // tp
    per_token = cache_per_token(text, config.dtype, tp)
    # The most numbers of a layer for each token: both halves of its feed-forward states, and two hidden states.
    widest = 2 * int(getattr(text, "intermediate_size", 4 * text.hidden_size)) // tp + 2 * int(text.hidden_size)
    passes = _PASS * widest * itemsize
    cache, cache_note = _cache(options, work, weights + passes)
    prefix = f"{config.backend}."
    during = "generate" if options.sleep and work.gpu else ""
    host = not work.gpu
    dtype = f"{config.dtype}, and matrices in {options.quantized}" if options.quantized else config.dtype
    terms = [
        MemoryTerm("weights", weights, during, f"all parameters in {dtype}, over tp = {tp}", host),
        MemoryTerm("KV cache", cache, during, cache_note, host),
        MemoryTerm("passes", passes, during, f"about {_PASS} tokens, the widest of their layers' states", host),
    ]
    fitting = cache // (per_token * work.tokens)
    wanted = min(config.slots, -(-work.rows * tp // prod(work.axes.values())))
    note = (
        f"a token takes {per_token / 1024:.0f} KiB of the KV cache: {fitting} rows of {work.tokens} tokens fit, "
        f"of {wanted} at once{'; the others wait, or are read again' if fitting < wanted else ''}"
    )
    smaller = options.kv_cache_mib is None and bool(work.gpu)
    knobs = [f"{prefix}memory_share={options.memory_share / 2:g}"] if smaller else []
    if work.gpu and not options.sleep:
        knobs.append(f"{prefix}sleep=true")
    return MemoryEstimate(terms, knobs, [note])


def weight_bytes(shape: PretrainedConfig, itemsize: int, quantized: str) -> int:
    """Count the bytes of all parameters, tied ones once. `quantized`: the format of matrices, if it is another."""
    network = without_values(shape)
    matrices = fp8.matrices(network) if quantized else frozenset[str]()
    return sum(
        each.numel() + len(each) * torch.float32.itemsize if name in matrices else each.numel() * itemsize
        for name, each in network.named_parameters()
    )


def _cache(options: EngineOptions, work: Workload, taken: int) -> tuple[int, str]:
    """Return the bytes of the KV cache, and where the number comes from. `taken`: bytes of weights and passes."""
    if options.kv_cache_mib is not None:
        return options.kv_cache_mib * MIB, f"kv_cache_mib = {options.kv_cache_mib}"
    if not work.gpu:
        return CPU_CACHE_MIB * MIB, "512 MiB, as without a GPU nothing else is said"
    share = int(options.memory_share * work.gpu)
    if share <= taken:
        raise ConfigError(
            f"memory_share = {options.memory_share:g} of a GPU's {work.gpu / 2**30:.0f} GiB is {share / 2**30:.1f} "
            f"GiB, and weights and passes take {taken / 2**30:.1f} GiB of it, which leaves nothing for keys and "
            "values: raise it, or divide the model over more ranks along tp"
        )
    return share - taken, f"memory_share = {options.memory_share:g} of {work.gpu / 2**30:.0f} GiB, less the other two"
