"""The memory of a rank of the megatron backend: its code, rehearsed in a group without other ranks."""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from meshrl.roles import MemoryEstimate, ModelConfig, PolicyConfig, Workload, options_of
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
from meshrl_torch.model.heads import predicts_of
from meshrl_torch.model.loading import GENERATOR, config_of
from meshrl_torch.model.packing import MicroBatch
from meshrl_torch.train.trainable import TrainedConfig


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
        return Decoder.of(config_of(self.config).get_text_config(), predicts_of(self.config))

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
            rehearsed = [_Rank(self, grid, groups, depth).rehearse() for depth in depths]
        (first, _), (last, rest) = rehearsed[0], rehearsed[-1]
        if grid.place["pp"] < self.pp - 1:  # it has no head
            last = last._replace(head=0)
        figures = last.deeper(first, max(0, each - max(DEPTHS))).figures()  # a layer more in each stage of the rank
        workspace = figures.workspace + rest
        if self.work.gpu:  # AdamW allocates 4 bytes for each number that it steps over: half of its moments
            workspace += max(0, figures.moments // 2 - figures.activations - figures.head - workspace)
        activations = figures.activations * self.flying(grid.place["pp"])
        return figures._replace(activations=activations, workspace=workspace)


@dataclass(frozen=True)
class _Rank:
    """One rank of a model whose stages have this many layers."""

    plan: _Plan
    grid: Grid
    groups: ProcessGroupCollection
    depth: int

    def rehearse(self) -> tuple[rehearsal.Rehearsal, int]:
        """Run two micro-batches through the largest stage. Scratch memory exists when the second one begins.

        Also returns the bytes outside the passes: scratch memory, and on a GPU the tokens of all micro-batches.
        """
        plan = self.plan
        micro = max(plan.micros, key=lambda each: each.ids.numel())
        split = self.grid.sizes["tp"] if plan.layout.sequence_parallel else 1
        part = part_of(micro, self.grid.place["cp"], self.grid.sizes["cp"], split)
        own = part.ids.numel() // split
        modes = rehearsal.fake.FakeTensorMode(allow_non_fake_inputs=True)
        skeleton = skeleton_of(plan.config, GENERATOR, 1).network
        balanced = _balanced(own * max(1, plan.shape.routing.chosen))
        with quiet(), fresh_scratch() as taken, modes, rehearsal.LiveBytes() as live, balanced:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            rotary = cast("nn.Module", skeleton.base_model.rotary_emb).to_empty(device=device)
            stage, called, figures = self._built(live, rotary)
            placed = self._on(part, torch.device(device))

            def run() -> None:
                fresh = replace(placed, attend=replace(placed.attend, bounds={}, masks={}))  # it keeps what it computed
                with nullcontext() if plan.trains else torch.no_grad():
                    output = self._passed(stage, called, fresh, own)
                    if plan.trains:
                        torch.autograd.backward(output, torch.empty_like(output))

            last = stage.decoder.layers[-1]
            measured, _ = rehearsal.rehearse(live, figures, stage.decoder, last, [run, run], plan.trains)
            scratch = sum(each.nbytes for each in taken.values())
        tokens = (part.ids, part.positions, part.source, part.target, part.attend.keys)
        rest = sum(each.nbytes for each in tokens if each is not None) * len(plan.micros) if plan.work.gpu else 0
        return measured, scratch + rest

    def _on(self, part: Part, device: torch.device) -> Part:
        """Return a part with its tensors on a device, with a GPU's attention if there is to be one."""
        keys, attention = part.attend.keys, rehearsal.GpuAttention if self.plan.work.gpu else Packed
        ids, positions, source, target = (
            each.to(device) for each in (part.ids, part.positions, part.source, part.target)
        )
        attend = attention(part.attend.groups, None if keys is None else keys.to(device))
        return Part(ids, positions, attend, source, target, part.targets)

    def _built(self, live: rehearsal.LiveBytes, rotary: nn.Module) -> tuple[Stage, nn.Module, rehearsal.Figures]:
        """Return one of the rank's stages, the module by which it is called, and what all of them hold."""
        plan, place = self.plan, self.grid.place["pp"]
        virtual = plan.layout.virtual_stages
        dtype = cast("torch.dtype", getattr(torch, plan.config.dtype))
        shape = replace(plan.shape, layers=self.depth * plan.pp * virtual, first_routed=0)
        recompute = isinstance(plan.config, PolicyConfig) and plan.config.activation_checkpointing
        config = shape.configuration(self.grid.sizes, dtype, plan.layout, recompute=recompute)
        groups = self.groups
        before = live.now
        stages = stages_of(shape, config, groups, self.grid, rotary, virtual, predicts_of(plan.config))
        _know_places(stages)
        stage = stages[0] if place == 0 and plan.pp > 1 else stages[-1]
        parameters = live.now - before
        if not plan.trains:
            return stage, stage, rehearsal.Figures(parameters)
        trained = [DistributedDataParallel(config, gradient_layout(), each, pg_collection=groups) for each in stages]
        buffers = [each for module in trained for each in (*module.buffers, *module.expert_parallel_buffers)]
        shards = [(each.param_dtype, each.numel // each.data_parallel_group.size()) for each in buffers]
        masters = sum(4 * count for kind, count in shards if kind != torch.float32)
        moments = sum(8 * count for _, count in shards)
        gc.collect()  # the parameters have moved to the buffers
        figures = rehearsal.Figures(parameters, masters, moments, live.now - before - parameters)
        return stage, trained[stages.index(stage)], figures

    def _passed(self, stage: Stage, called: nn.Module, part: Part, tokens: int) -> Tensor:
        """Return the stage's output. A stage after the first gets states like those of the previous one."""
        if not stage.pre_process:
            kind = stage.config.params_dtype
            states = torch.empty(tokens, 1, self.plan.shape.hidden, dtype=kind, device=part.ids.device)
            stage.set_input_tensor(states.requires_grad_(self.plan.trains))
        valued = predicts_of(self.plan.config) != "logprobs" or not stage.post_process
        targets = None if valued else Targets(torch.empty_like(part.source), None)
        return cast("Tensor", called(part, targets))


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


def _balanced(chosen: int) -> AbstractContextManager[object]:
    """Replace numbers that a mixture reads from its tensors by those of equally loaded experts, inside the block.

    `chosen`: tokens that a rank sends to experts and receives, counted once for each of a token's experts.
    """

    def counts(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
        each = np.arange(tensor.numel() + 1) * chosen // tensor.numel()
        return np.diff(each).reshape(tuple(tensor.shape))

    def select(values: Tensor, mask: Tensor) -> Tensor:
        return cast("Tensor", _Selected.apply(values, mask, chosen))  # type: ignore[no-untyped-call]

    instead: dict[str, Any] = {"tolist": lambda each: counts(each).tolist(), "numpy": counts, "masked_select": select}
    replaced: AbstractContextManager[object] = patch.multiple(rehearsal.fake.FakeTensor, create=True, **instead)
    return replaced
