"""The memory of a role's rank, of the backends `torch` and `fsdp`: their code, rehearsed without memory."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from meshrl import log
from meshrl.data import Batch, Ragged
from meshrl.errors import BackendError, ConfigError, ModelError
from meshrl.roles import (
    LoraConfig,
    MemoryEstimate,
    MemoryTerm,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplerConfig,
    Workload,
    options_of,
)
from meshrl_torch.estimate import rehearsal
from meshrl_torch.estimate.flops import cache_per_token
from meshrl_torch.estimate.vision import image_memory
from meshrl_torch.model.adapted import Adapters
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.loading import Kind, config_of, packing_of, quiet, vision_of, without_values
from meshrl_torch.model.lora import add_adapter
from meshrl_torch.model.network import LanguageModel, ready, with_layout
from meshrl_torch.model.packing import MicroBatch, Rows, learned, whole
from meshrl_torch.model.scoring import Predict
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.options import FsdpConfig
from meshrl_torch.sample.decoder import GROWTH, PREFILL_TOKENS
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer
from meshrl_torch.train.fsdp.sharded import shard
from meshrl_torch.train.fsdp.world import World, grid_of
from meshrl_torch.train.optimizer import Optimizer
from meshrl_torch.train.trainable import RoleModel, TrainedConfig, role_model

DEPTHS: Final = (2, 3)
"""Numbers of layers of the rehearsed models. Each further layer needs as much as the third."""
_OFFLOADED: Final = ("parameters", "moments", "gradients")
"""Kept in the host's memory with `fsdp.cpu_offload`."""
_LOGITS: Final = 3
"""Copies of a step's logits: the logits, the probabilities, and their cumulative sums."""


@dataclass(frozen=True)
class Layout:
    """A role's model in a backend's layout on a rank, on the device `meta`. `root` has all parameters."""

    root: nn.Module
    predict: Predict
    role: RoleModel | None = None
    optimizer: Callable[[OptimizerConfig, Sequence[nn.Parameter]], Optimizer] = Optimizer
    """Makes the role's optimizer, if it is trained."""
    gathered: int = 0
    """Bytes of parameters that are whole during an entire pass, in addition to their shards."""
    adapters: Mapping[str, LoraConfig] = field(default_factory=dict[str, LoraConfig])
    """To be added to the model by name, each whole on the rank."""
    dtype: torch.dtype = torch.float32
    """Of the adapters."""


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
    measured, during = figures(config, here, partial(_whole, config)), "update" if trains else "score"
    seen = image_memory(config, here, budget_of(config), during, host=True)
    return MemoryEstimate([*measured.terms(during, host=True), *seen], knobs(config))


def _whole(config: ModelConfig, model: LanguageModel) -> Layout:
    role = role_model(config, model)
    root = nn.ModuleList([role.model.network, *([role.head] if role.head else [])])
    return Layout(root, role.predict, role, adapters=_declared(config), dtype=getattr(torch, config.dtype))


def _declared(config: ModelConfig) -> Mapping[str, LoraConfig]:
    return config.declared if isinstance(config, PolicyConfig | SamplerConfig) else {}


def held_sharded(config: ModelConfig, work: Workload) -> MemoryEstimate:
    """Estimate the memory of the first rank of the backend `fsdp`, whose shards are the largest.

    BackendError for unsupported cases, ConfigError if the process is in a process group already.
    """
    layout = options_of(config, FsdpConfig)
    trains = isinstance(config, TrainedConfig)
    if trains and layout.gradient_sync == "last":
        raise BackendError('gradient_sync = "last" keeps whole gradients, which are not counted yet')
    wide, grid = config.model_copy(update={"dtype": "float32"}), grid_of(work.axes, layout)
    with rehearsal.rehearsed_alone(0, grid.numel()):
        world = World.on(grid, torch.device("cpu"))
        measured = figures(wide, work, partial(_sharded, config, layout, world))
    terms = measured.terms("update" if trains else "score", host=not work.gpu)
    if layout.cpu_offload and work.gpu:
        terms = [replace(each, host=each.name in _OFFLOADED) for each in terms]
    elif layout.offload_moments and work.gpu and trains:
        terms = _without_moments(terms)
    if trains and work.gpu:
        terms.append(_reduction(config, measured.gathered, grid.shape[1]))
    seen = image_memory(config, work, budget_of(config), "update" if trains else "score", host=not work.gpu)
    offload = [] if layout.cpu_offload or not work.gpu else ["fsdp.cpu_offload=true"]
    offload += ["fsdp.offload_moments=true"] if offload and trains and not layout.offload_moments else []
    return MemoryEstimate([*terms, *seen], [*knobs(config), *offload])


def _sharded(config: ModelConfig, layout: FsdpConfig, world: World, model: LanguageModel) -> Layout:
    role, dtype = role_model(config, model), cast("torch.dtype", getattr(torch, config.dtype))
    on_gpu = layout.model_copy(update={"cpu_offload": False, "compile": False})
    sharded = shard(role.model, world, on_gpu, dtype, [role.head] if role.head else [])
    apart = [each for each in sharded.root.modules() if isinstance(each, FSDPModule) and id(each) != id(sharded.root)]
    own = {id(parameter) for each in apart for parameter in each.parameters()}
    gathered = sum(each.numel() for each in sharded.root.parameters() if id(each) not in own) * dtype.itemsize

    def optimizer(table: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> Optimizer:
        return Optimizer(table, parameters) if role.model.adapters else ShardedOptimizer(table, sharded, parameters)

    return Layout(sharded.root, sharded.predicting(role.predict), role, optimizer, gathered, _declared(config), dtype)


def _hidden(model: LanguageModel, batch: Batch, micro: MicroBatch) -> Tensor:  # noqa: ARG001
    return model.hidden(micro.ids, micro.positions, micro.attend)


def _reduction(config: ModelConfig, gathered: int, shards: int) -> MemoryTerm:
    """Return what FSDP keeps on a GPU from a micro-batch to the next one, and a CPU does not. Measured on fake GPUs."""
    itemsize = cast("torch.dtype", getattr(torch, config.dtype)).itemsize
    trained = 0 if getattr(config, "is_adapted", False) else gathered // itemsize
    sums = 4 * trained + 12 * trained // shards
    text = "embeddings and head, whole once more, and their gradients in float32, whole and three times sharded"
    return MemoryTerm("reduction", gathered + sums, "update", text)


def _without_moments(terms: Sequence[MemoryTerm]) -> list[MemoryTerm]:
    """Return the terms with moments in the host's memory, from where they come for the optimizer's step alone."""
    sizes = {each.name: each.nbytes for each in terms}
    stepping = sizes["moments"] + sizes["gradients"]
    text = "moments and gradients, during the optimizer's step, when the activations are gone"
    own = [replace(each, host=True) if each.name == "moments" else each for each in terms]
    return [*own, MemoryTerm("step", stepping, "step", text)]


def _sampler(config: SamplerConfig, work: Workload) -> MemoryEstimate:
    """The model, the slots for its rows, and the longest pass over prompts."""
    prompts = replace(work, completion=1, rows=-(-work.rows // work.n), n=1)

    def laid_out(model: LanguageModel) -> Layout:
        model = replace(model, adapters=Adapters())
        role = RoleModel("sampler", model, _hidden)
        dtype = getattr(torch, config.dtype)
        return Layout(model.network, role.predict, role, adapters=_declared(config), dtype=dtype)

    measured = figures(config, prompts, laid_out, PREFILL_TOKENS)
    shape = config_of(config).get_text_config()
    slots = min(config.slots, work.own_rows)
    positions = -(-(work.tokens + 1) // GROWTH) * GROWTH
    cache = slots * positions * cache_per_token(shape, config.dtype)
    logits = _LOGITS * slots * int(shape.vocab_size) * 4
    once = f"a pass over {PREFILL_TOKENS} tokens of prompts at most"
    rows = (
        ("parameters", measured.parameters, "", "each parameter and buffer, in the table's dtype"),
        ("KV cache", cache, "", f"{slots} slots of {positions} positions, kept between calls"),
        ("logits", logits, "generate", f"{slots} slots, {_LOGITS} times float32 of the vocabulary"),
        ("prefill", measured.head, "generate", once),
    )
    terms = [MemoryTerm(*row, host=True) for row in rows]
    seen = image_memory(config, prompts, PREFILL_TOKENS, "generate", host=True)
    return MemoryEstimate([*terms, *seen], [f"slots={max(1, slots // 2)}", *knobs(config)])


def budget_of(config: ModelConfig) -> int:
    """Return the most tokens of a role's micro-batch, 1 if it has none."""
    return int(getattr(config, "micro_batch_tokens", 1))


def knobs(config: ModelConfig) -> list[str]:
    """List the settings of a role, the same for all backends, that would reduce its memory."""
    settings: list[str] = []
    if isinstance(config, PolicyConfig) and not config.activation_checkpointing:
        settings.append("activation_checkpointing=true")
    if (budget := budget_of(config)) > 1:
        settings.append(f"micro_batch_tokens={budget // 2}")
    if config.dtype == "float32":
        settings.append("dtype=bfloat16")
    return settings


def figures(
    config: ModelConfig, work: Workload, lay_out: Callable[[LanguageModel], Layout], budget: int | None = None
) -> rehearsal.Figures:
    """Compute the figures of the rank that holds the most of a role's model, for micro-batches of `budget` tokens.

    `lay_out` places a model on a rank. The other ranks do not exist. A model of more than three equal layers is
    rehearsed with two and with three, and their difference counts for each further layer.
    """
    layers = int(config_of(config).get_text_config().num_hidden_layers)
    most = budget or budget_of(config)
    attention = rehearsal.GpuAttention if work.gpu else Packed
    rehearsed: list[rehearsal.Rehearsal] = []
    for depth in DEPTHS if layers > max(DEPTHS) else (layers,):
        with log.silenced():
            model = with_layout(skeleton_of(config, kind_of(config), depth), packing_of(config))
        passes = [_micro_batch(model, work, tokens, trains=isinstance(config, TrainedConfig)) for tokens in (1, most)]
        fresh = [  # it keeps what it computed
            (batch, replace(micro, attend=attention(micro.attend.groups, micro.attend.keys))) for batch, micro in passes
        ]
        try:
            rehearsed.append(_rehearse(config, model, lay_out(model), fresh))
        except (rehearsal.fake.DataDependentOutputException, rehearsal.fake.DynamicOutputShapeException) as error:
            raise ModelError(
                f"{type(model.network).__name__} takes a different amount of memory for other values ({error.func}), "
                "as mixtures of experts do: its memory is unknown before a run"
            ) from error
    shallow, last = rehearsed[0], rehearsed[-1]
    return last.deeper(max(0, layers - max(DEPTHS)), last, shallow).figures()


def skeleton_of(config: ModelConfig, kind: Kind, depth: int) -> LanguageModel:
    """Make the first layers of a model, on the device `meta`. Its tokenizer is a placeholder."""
    with quiet():
        network = without_values(config_of(config), kind, getattr(torch, config.dtype))
    _shorten(network, depth)
    words = character_tokenizer("a", 8)
    return ready(network, words, None, vision=vision_of(config, network.config, words))


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


def _micro_batch(model: LanguageModel, work: Workload, budget: int, *, trains: bool) -> tuple[Batch, MicroBatch]:
    """Make the largest micro-batch of rows with the longest prompt and completion, packed or padded."""
    batch, rows, learn = longest_rows(work, budget // work.tokens + 2, trains=trains)
    return batch, max(model.split(batch.tokens, rows, learn, budget), key=lambda each: each.ids.numel())


def _rehearse(
    config: ModelConfig, model: LanguageModel, layout: Layout, passes: Iterable[tuple[Batch, MicroBatch]]
) -> rehearsal.Rehearsal:
    """Run two micro-batches and measure the second, at whose start gradients exist."""
    trains = isinstance(config, TrainedConfig)
    modes = rehearsal.fake.FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings()
    with modes[0], modes[1], rehearsal.LiveBytes() as live, nullcontext() if trains else torch.no_grad():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP compares it
        layout.root.to_empty(device="cpu")
        model.network.tie_weights()
        for name, lora in layout.adapters.items():
            of = cast("RoleModel", layout.role).model
            add_adapter(of, name, lora, seed=config.seed, dtype=layout.dtype, device=torch.device("cpu"))
        parameters = live.now
        optimizer = None
        if layout.role and isinstance(config, TrainedConfig):
            optimizer = layout.optimizer(config.optimizer, list(layout.role.parameters.values()))
        masters = live.now - parameters
        moments = sum(2 * each.numel() * torch.float32.itemsize for each in (optimizer.masters if optimizer else ()))
        blocks = [each for each in model.network.modules() if isinstance(each, nn.ModuleList) and len(each)]

        def run(batch: Batch, micro: MicroBatch) -> None:
            output = layout.predict(batch, micro)
            if trains:
                output.sum().backward()

        figures = rehearsal.Figures(parameters, masters, moments, gathered=layout.gathered)
        runs = [partial(run, *each) for each in passes]
        measured, grown = rehearsal.rehearse(live, figures, model.body, blocks[0][-1], runs, trains)
    return measured._replace(held=measured.held._replace(gradients=max(0, grown)))
