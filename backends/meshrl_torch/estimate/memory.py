"""The memory of a role's rank, of the backend `torch`: its own code, rehearsed with tensors that have no memory."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from meshrl.data import Batch, Ragged
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import MemoryEstimate, MemoryTerm, ModelConfig, PolicyConfig, SamplerConfig, Workload
from meshrl_torch.estimate import rehearsal
from meshrl_torch.estimate.flops import cache_per_token
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.loading import Kind, config_of, quiet, unreadable
from meshrl_torch.model.lora import adapt
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.packing import MicroBatch, Rows, learned, micro_batches, whole
from meshrl_torch.model.scoring import Predict
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.sample.decoder import GROWTH, PREFILL_TOKENS
from meshrl_torch.train.optimizer import Optimizer
from meshrl_torch.train.roles import TrainedConfig, role_model

DEPTHS: Final = (2, 3)
"""Numbers of layers of the rehearsed models. Each further layer needs as much as the third."""
_LOGITS: Final = 3
"""Copies of a step's logits: the logits, the probabilities, and their cumulative sums."""


@dataclass(frozen=True)
class Layout:
    """A role's model in a backend's layout on a rank, on the device `meta`."""

    root: nn.Module
    """The module with all parameters."""
    predict: Predict
    steps_over: Callable[[], Sequence[Tensor]] | None = None
    """Makes an optimizer, and returns the tensors that it steps over. None for a model that is not trained."""
    gathered: int = 0
    """Bytes of parameters that are whole during an entire pass, in addition to their shards."""


def held(config: ModelConfig, work: Workload) -> MemoryEstimate:
    """Estimate the memory of a rank of the backend `torch`, all of it on the host: a whole model, and what it does."""
    here = replace(work, gpu=0)
    if isinstance(config, SamplerConfig):
        return _sampler(config, here)
    trains = isinstance(config, TrainedConfig)
    if trains and prod(work.axes.values()) > 1:
        raise ConfigError(
            f"the backend 'torch' trains on one rank, but the mesh {config.mesh!r} has {dict(work.axes)}: take "
            'backend = "fsdp", or one rank'
        )
    measured = figures(config, here, budget_of(config), partial(_whole, config))
    return MemoryEstimate(measured.terms("update" if trains else "score", host=True), knobs(config))


def _whole(config: ModelConfig, model: LanguageModel) -> Layout:
    role = role_model(config, model)
    root = nn.ModuleList([role.model.network, role.head] if role.head else [role.model.network])
    if not isinstance(config, TrainedConfig):
        return Layout(root, role.predict)
    optimizer = config.optimizer
    return Layout(root, role.predict, lambda: Optimizer(optimizer, list(role.parameters.values())).masters)


def _sampler(config: SamplerConfig, work: Workload) -> MemoryEstimate:
    """The model, the slots for its rows, and the longest pass over prompts."""
    prompts = replace(work, completion=1, rows=-(-work.rows // work.n), n=1)

    def laid_out(model: LanguageModel) -> Layout:
        adapt(model, config.lora, config.seed)
        return Layout(model.network, lambda _, micro: model.hidden(micro.ids, micro.positions, micro.attend))

    measured = figures(config, prompts, PREFILL_TOKENS, laid_out)
    shape = config_of(config).get_text_config()
    slots = min(config.slots, work.own_rows)
    positions = -(-(work.tokens + 1) // GROWTH) * GROWTH
    cache = slots * positions * cache_per_token(shape, config.dtype)
    logits = _LOGITS * slots * int(shape.vocab_size) * 4
    terms = [
        MemoryTerm("parameters", measured.parameters, "", "each parameter and buffer, in the table's dtype", host=True),
        MemoryTerm("KV cache", cache, "", f"{slots} slots of {positions} positions, kept between calls", host=True),
        MemoryTerm(
            "logits", logits, "generate", f"{slots} slots, {_LOGITS} times float32 of the vocabulary", host=True
        ),
        MemoryTerm(
            "prefill", measured.head, "generate", f"a pass over {PREFILL_TOKENS} tokens of prompts at most", host=True
        ),
    ]
    return MemoryEstimate(terms, [f"slots={max(1, slots // 2)}", *knobs(config)])


def budget_of(config: ModelConfig) -> int:
    """Return the most tokens of a micro-batch."""
    return int(getattr(config, "micro_batch_tokens", 1))


def knobs(config: ModelConfig) -> list[str]:
    """List the settings of a role, the same for all backends, that would reduce its memory."""
    settings: list[str] = []
    if isinstance(config, PolicyConfig) and not config.activation_checkpointing:
        settings.append("activation_checkpointing=true")
    budget: object = getattr(config, "micro_batch_tokens", 1)
    if isinstance(budget, int) and budget > 1:
        settings.append(f"micro_batch_tokens={budget // 2}")
    if config.dtype == "float32":
        settings.append("dtype=bfloat16")
    return settings


def figures(
    config: ModelConfig, work: Workload, budget: int, lay_out: Callable[[LanguageModel], Layout]
) -> rehearsal.Figures:
    """Compute the figures of the rank that holds the most of a role's model. Micro-batches have `budget` tokens.

    `lay_out` places a model on a rank. The other ranks do not exist. A model of more than three equal layers is
    rehearsed with two and with three, and their difference counts for each further layer.
    """
    shape = config_of(config)
    kind = kind_of(config)
    layers = int(shape.get_text_config().num_hidden_layers)
    trains = isinstance(config, TrainedConfig)
    passes = [_micro_batch(work, tokens, trains=trains) for tokens in (1, budget)]
    attention = rehearsal.GpuAttention if work.gpu else Packed
    rehearsed: list[rehearsal.Rehearsal] = []
    for depth in DEPTHS if layers > max(DEPTHS) else (layers,):
        model = skeleton_of(config, shape, kind, depth)
        fresh = [  # it keeps what it computed
            (batch, replace(micro, attend=attention(micro.attend.groups, micro.attend.keys))) for batch, micro in passes
        ]
        try:
            rehearsed.append(_rehearse(model, lay_out(model), fresh))
        except (rehearsal.fake.DataDependentOutputException, rehearsal.fake.DynamicOutputShapeException) as error:
            raise ModelError(
                f"{type(model.network).__name__} takes a different amount of memory for other values ({error.func}), "
                "as mixtures of experts do: its memory is unknown before a run"
            ) from error
    last = rehearsed[-1]
    if len(rehearsed) > 1:
        last = last.deeper(rehearsed[0], layers - max(DEPTHS))
    return last.figures


def skeleton_of(config: ModelConfig, shape: PretrainedConfig, kind: Kind, depth: int) -> LanguageModel:
    """Make the first layers of a model, on the device `meta`. Its tokenizer is a placeholder."""
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    try:
        with quiet(), torch.device("meta"):
            network = cast("PreTrainedModel", kind.make(shape, dtype=dtype))
    except Exception as error:
        raise unreadable(str(config.model), kind, error) from error
    network.tie_weights()
    _shorten(network, depth)
    return ready(network, character_tokenizer("a", 8), None)


def _shorten(network: PreTrainedModel, depth: int) -> None:
    """Keep only the first layers of a model. ModelError if they differ in size."""
    names = cast("Sequence[str]", getattr(network, "_no_split_modules", None) or ())
    for parent in list(network.modules()):
        for name, layers in list(parent.named_children()):
            if not isinstance(layers, nn.ModuleList) or {type(each).__name__ for each in layers} - set(names):
                continue
            if len({tuple(each.shape for each in layer.parameters()) for layer in layers}) > 1:
                raise ModelError(
                    f"{type(network).__name__} has layers of different sizes, and memory is estimated from one layer: "
                    "how much it takes is not known"
                )
            setattr(parent, name, layers[:depth])


def longest_rows(work: Workload, families: int, *, trains: bool) -> tuple[Batch, Rows, Ragged | None]:
    """Make rows of the longest prompt and completion in up to `families` families, and the tokens to read or learn."""
    count = min(work.own_rows, families * work.n)
    prompts = [np.full(work.prompt, row // work.n, np.int32) for row in range(count)]
    completions = [np.full(work.completion, row, np.int32) for row in range(count)]  # all begin differently
    tokens = Ragged.of(list(map(np.append, prompts, completions)), np.int32)
    mask = Ragged(np.tile(np.arange(work.tokens) >= work.prompt, count), tokens.offsets)
    rows, learn = (learned(tokens, mask), mask) if trains else (whole(tokens, mask), None)
    return Batch.of(tokens=tokens, loss_mask=mask), rows, learn


def _micro_batch(work: Workload, budget: int, *, trains: bool) -> tuple[Batch, MicroBatch]:
    """Make the largest micro-batch of rows with the longest prompt and completion."""
    batch, rows, learn = longest_rows(work, budget // work.tokens + 2, trains=trains)
    return batch, max(micro_batches(batch.tokens, rows, learn, budget), key=lambda each: each.ids.numel())


def _rehearse(model: LanguageModel, layout: Layout, passes: Iterable[tuple[Batch, MicroBatch]]) -> rehearsal.Rehearsal:
    """Run two micro-batches and measure the second, at whose start gradients exist."""
    trains = layout.steps_over is not None
    modes = rehearsal.fake.FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings()
    with modes[0], modes[1], rehearsal.LiveBytes() as live, nullcontext() if trains else torch.no_grad():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP compares it
        layout.root.to_empty(device="cpu")
        model.network.tie_weights()
        parameters = live.now
        stepped = layout.steps_over() if layout.steps_over else ()
        masters = live.now - parameters
        moments = sum(2 * each.numel() * torch.float32.itemsize for each in stepped)
        held = before = live.now
        blocks = [each for each in model.network.modules() if isinstance(each, nn.ModuleList) and len(each)]
        meter = rehearsal.PeakMeter(live, model.network.base_model, blocks[0][-1])
        for batch, micro in passes:
            before = live.now
            meter.begin()
            output = layout.predict(batch, micro)
            if trains:
                output.sum().backward()
            del output
            meter.end()
    return meter.rehearsal(
        rehearsal.Figures(parameters, masters, moments, max(0, before - held), layout.gathered, 0, 0, 0),
        before,
        trains=trains,
    )
