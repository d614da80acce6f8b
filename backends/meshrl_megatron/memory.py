"""The memory of a rank of the megatron backend: its code, rehearsed in a group without other ranks."""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.roles import (
    CriticConfig,
    MemoryEstimate,
    ModelConfig,
    PolicyConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    Workload,
    options_of,
)
from meshrl_megatron.core import DistributedDataParallel, ProcessGroupCollection, fresh_scratch, quiet
from meshrl_megatron.optimizer import gradient_layout
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.parts import Part, part_of
from meshrl_megatron.passes import Balance
from meshrl_megatron.shape import Decoder
from meshrl_megatron.stage import Stage, Targets, stages_of
from meshrl_megatron.world import Grid
from meshrl_torch.estimate import rehearsal
from meshrl_torch.estimate.memory import DEPTHS, knobs, longest_rows, skeleton_of
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.loading import GENERATOR, config_of
from meshrl_torch.model.packing import MicroBatch
from meshrl_torch.train.roles import TrainedConfig

_KEPT: Final = 4
"""Bytes that torch's AdamW allocates on a GPU for each number that it steps over."""


def held(config: ModelConfig, work: Workload) -> MemoryEstimate:
    """Estimate the memory of a role on the rank that holds the most: of the first stage or the last one.

    ConfigError if the process is in a process group already, or if the axes do not fit.
    """
    plan = _Plan(config, work)
    plan.shape.check(plan.grid(0).sizes, plan.layout)
    ends = [plan.figures(rank) for rank in sorted({0, plan.grid(0).rank(pp=plan.pp - 1)})]
    figures = max(ends, key=sum)
    terms = figures.terms("update" if plan.trains else "score", host=not work.gpu)
    always = [replace(each, during="") if each.name == "gradients" else each for each in terms]
    experts = [f"megatron.experts={2 * plan.layout.experts}"] if plan.shape.experts else []
    notes = [f"of its {plan.pp} stages the {'first' if figures is ends[0] else 'last'} one, which takes most"]
    if plan.shape.experts:
        notes.append("as many tokens for each expert as for another; ranks whose experts are chosen oftener hold more")
    return MemoryEstimate(always, [*knobs(config), *experts], notes if plan.pp > 1 else notes[1:])


@dataclass(frozen=True)
class _Plan:
    """A role's model on its ranks."""

    config: ModelConfig
    work: Workload

    @property
    def trains(self) -> bool:
        """True if it is trained."""
        return isinstance(self.config, TrainedConfig)

    @property
    def predicts(self) -> Predicts:
        """The prediction of its last stage."""
        if isinstance(self.config, CriticConfig):
            return "values"
        return "scores" if isinstance(self.config, RewardModelConfig | RewardTrainingConfig) else "logprobs"

    @property
    def layout(self) -> MegatronConfig:
        """The backend's options."""
        options = options_of(self.config, MegatronConfig)
        return options.model_copy(update={"transformer_impl": "local"})  # of the same sizes, and always installed

    @property
    def pp(self) -> int:
        """Number of ranks in a pipeline."""
        return self.work.axes.get("pp", 1)

    @cached_property
    def shape(self) -> Decoder:
        """The shape of the model."""
        return Decoder.of(config_of(self.config).get_text_config(), valued=self.predicts != "logprobs")

    def grid(self, rank: int) -> Grid:
        """Return the ranks by their places."""
        return Grid(self.work.axes, rank, self.layout.experts)

    @cached_property
    def micros(self) -> Sequence[MicroBatch]:
        """A step's micro-batches, of the longest rows. Only some of very many."""
        budget, stages = int(getattr(self.config, "micro_batch_tokens", 1)), self.pp * self.layout.virtual_stages
        balance = Balance.of(self.shape, stages)
        families = balance.fewest * (budget // self.work.tokens + 2)
        batch, rows, learn = longest_rows(self.work, families, trains=self.trains)
        return list(balance(batch.tokens, rows, learn, budget))

    def flying(self, place: int) -> int:
        """Return how many passes' activations a rank holds at once, at its place in the pipeline."""
        if not self.trains:
            return 1
        virtual = self.layout.virtual_stages
        ahead = self.pp - place - 1
        warm = 2 * ahead + (virtual - 1) * self.pp if virtual > 1 else ahead
        return min(warm + 1, len(self.micros) * virtual)

    def figures(self, rank: int) -> rehearsal.Figures:
        """Return the figures of a rank."""
        each = self.shape.layers // (self.pp * self.layout.virtual_stages)
        depths = DEPTHS if each > max(DEPTHS) else (each,)
        with rehearsal.rehearsed_alone(rank, prod(self.work.axes.values())):
            grid = self.grid(rank)
            groups = grid.collection(rank)
            first, *more = (_Rank(self, grid, groups, depth).rehearse() for depth in depths)
        last = more[0].deeper(first, each - max(DEPTHS)) if more else first  # a layer more in each stage of the rank
        return last.figures._replace(activations=last.figures.activations * self.flying(grid.place["pp"]))


class _Built(NamedTuple):
    """A rank's stages, and one of them as it is called."""

    stage: Stage
    called: nn.Module
    parameters: int
    masters: int
    moments: int
    gradients: int
    stepped: int
    """Numbers that the optimizer steps over."""


@dataclass(frozen=True)
class _Rank:
    """One rank of a model whose stages have this many layers."""

    plan: _Plan
    grid: Grid
    groups: ProcessGroupCollection
    depth: int

    def rehearse(self) -> rehearsal.Rehearsal:
        """Run two micro-batches through the largest stage. Scratch memory exists when the second one begins."""
        plan = self.plan
        micro = max(plan.micros, key=lambda each: each.ids.numel())
        tp = self.grid.sizes["tp"]
        split = tp if plan.layout.sequence_parallel else 1
        part = part_of(micro, self.grid.place["cp"], self.grid.sizes["cp"], split)
        chosen = part.ids.numel() // split * max(1, plan.shape.chosen)
        modes = rehearsal.fake.FakeTensorMode(allow_non_fake_inputs=True)
        skeleton = skeleton_of(plan.config, config_of(plan.config), GENERATOR, 1).network
        with quiet(), fresh_scratch() as taken, modes, rehearsal.LiveBytes() as live, _balanced(chosen):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            rotary = cast("nn.Module", skeleton.base_model.rotary_emb).to_empty(device=device)
            built = self._built(live, rotary)
            meter = rehearsal.PeakMeter(live, built.stage.decoder, built.stage.decoder.layers[-1])
            placed = self._on(part, torch.device(device))
            held = live.now
            for _ in range(2):
                meter.begin()
                with nullcontext() if plan.trains else torch.no_grad():
                    output = self._passed(built, placed, part.ids.numel() // split)
                    if plan.trains:
                        torch.autograd.backward(output, torch.empty_like(output))
                del output
                meter.end()
            scratch = sum(each.numel() * each.itemsize for each in taken.values())
        figures = rehearsal.Figures(built.parameters, built.masters, built.moments, built.gradients, 0, 0, 0, 0)
        measured = meter.rehearsal(figures, held + scratch, trains=plan.trains)
        return self._with_rest(measured, scratch, built.stepped, part)

    def _with_rest(self, measured: rehearsal.Rehearsal, scratch: int, stepped: int, part: Part) -> rehearsal.Rehearsal:
        """Add memory outside the passes: scratch memory, the tokens of all micro-batches, and the step on a GPU."""
        figures = measured.figures
        if self.grid.place["pp"] < self.plan.pp - 1:  # it has no head
            figures = figures._replace(workspace=figures.workspace + figures.head, head=0)
        workspace = figures.workspace + scratch
        if self.plan.work.gpu:
            tokens = (part.ids, part.positions, part.source, part.target, part.attend.keys)
            own = sum(each.numel() * each.itemsize for each in tokens if each is not None)
            workspace += own * len(self.plan.micros)
            workspace += max(0, _KEPT * stepped - figures.activations - figures.head - workspace)
        return replace(measured, figures=figures._replace(workspace=workspace))

    def _on(self, part: Part, device: torch.device) -> Part:
        """Return a part with its tensors on a device, with a GPU's attention if there is to be one."""
        keys, attention = part.attend.keys, rehearsal.GpuAttention if self.plan.work.gpu else Packed
        ids, positions, source, target = (
            each.to(device) for each in (part.ids, part.positions, part.source, part.target)
        )
        attend = attention(part.attend.groups, None if keys is None else keys.to(device))
        return Part(ids, positions, attend, source, target, part.targets)

    def _built(self, live: rehearsal.LiveBytes, rotary: nn.Module) -> _Built:
        plan, place = self.plan, self.grid.place["pp"]
        virtual = plan.layout.virtual_stages
        dtype = cast("torch.dtype", getattr(torch, plan.config.dtype))
        shape = replace(plan.shape, layers=self.depth * plan.pp * virtual)
        recompute = isinstance(plan.config, PolicyConfig) and plan.config.activation_checkpointing
        config = shape.configuration(self.grid.sizes, dtype, plan.layout, recompute=recompute)
        groups = self.groups
        before = live.now
        stages = stages_of(shape, config, groups, self.grid, rotary, virtual, plan.predicts)
        _know_places(stages)
        run = stages[0] if place == 0 and plan.pp > 1 else stages[-1]
        parameters = live.now - before
        if not plan.trains:
            return _Built(run, run, parameters, 0, 0, 0, 0)
        trained = [DistributedDataParallel(config, gradient_layout(), each, pg_collection=groups) for each in stages]
        buffers = [each for stage in trained for each in (*stage.buffers, *stage.expert_parallel_buffers)]
        shards = [(each.param_dtype, each.numel // each.data_parallel_group.size()) for each in buffers]
        stepped = sum(count for _, count in shards)
        masters = sum(4 * count for kind, count in shards if kind != torch.float32)
        gc.collect()  # the parameters have moved to the buffers
        gradients = live.now - before - parameters
        called = trained[stages.index(run)]
        return _Built(run, called, parameters, masters, 8 * stepped, gradients, stepped)

    def _passed(self, built: _Built, part: Part, tokens: int) -> Tensor:
        """Return the stage's output. A stage after the first gets states like those of the previous one."""
        stage = built.stage
        if not stage.pre_process:
            kind = built.stage.config.params_dtype
            states = torch.empty(tokens, 1, self.plan.shape.hidden, dtype=kind, device=part.ids.device)
            stage.set_input_tensor(states.requires_grad_(self.plan.trains))
        valued = self.plan.predicts != "logprobs" or not stage.post_process
        targets = None if valued else Targets(torch.empty_like(part.source), None)
        return cast("Tensor", built.called(part, targets))


def _know_places(stages: Sequence[Stage]) -> None:
    """Give mixtures real numbers for the places of their experts, which Megatron reads."""
    for module in (each for stage in stages for each in stage.modules()):
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            with rehearsal.fake.unset_fake_temporarily():
                for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
                    setattr(dispatcher, name, torch.arange(getattr(dispatcher, name).numel()))


class _Selected(torch.autograd.Function):
    """Selects this many numbers of a tensor, and keeps and returns the same as `masked_select`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.like = values.shape
        return values.new_empty(count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].new_zeros(ctx.like), None, None


@contextmanager
def _balanced(chosen: int) -> Generator[None]:
    """Replace numbers that a mixture reads from its tensors by those of equally loaded experts.

    `chosen`: tokens that a rank sends to experts and receives, counted once for each of a token's experts.
    """

    def counts(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
        each = np.arange(tensor.numel() + 1) * chosen // tensor.numel()
        return np.diff(each).reshape(tuple(tensor.shape))

    def select(values: Tensor, mask: Tensor) -> Tensor:
        return cast("Tensor", _Selected.apply(values, mask, chosen))  # type: ignore[no-untyped-call]

    tensor: Any = rehearsal.fake.FakeTensor
    instead = {"tolist": lambda each: counts(each).tolist(), "numpy": counts, "masked_select": select}
    before = {name: vars(tensor).get(name) for name in instead}
    for name, function in instead.items():
        setattr(tensor, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                delattr(tensor, name)
            else:
                setattr(tensor, name, function)
