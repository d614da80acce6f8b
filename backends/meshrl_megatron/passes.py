"""Run micro-batches of different lengths through the pipeline, forwards and backwards, by Megatron's schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.data import Batch
from meshrl_megatron.balance import Balance
from meshrl_megatron.core import P2PCommunicator, get_forward_backward_func, quiet
from meshrl_megatron.model import Model
from meshrl_megatron.parts import Part, part_of
from meshrl_megatron.stage import Asked
from meshrl_torch.model.devices import moved
from meshrl_torch.model.packing import MicroBatch
from meshrl_torch.model.scoring import Passes, temperatures

Judged: TypeAlias = Callable[[Tensor, MicroBatch], Tensor]
"""A micro-batch's part of the loss, float32[], from the model's predictions for its targets."""
_Step: TypeAlias = tuple[MicroBatch, Part, Asked | None]


class Pipeline:
    """The stages of a model on this rank, and on the other ranks along `pp`."""

    def __init__(self, stages: Sequence[nn.Module], model: Model, *, valued: bool) -> None:
        """`stages`: the model's stages, or Megatron's wrappers of them."""
        self._stages, self._config, self._world, self._valued = list(stages), model.config, model.world, valued
        self._words = model.words
        self._split: Final = Balance.of(model.shape, model.world.grid.sizes["pp"] * len(stages))
        pp = model.world.grid.sizes["pp"]
        self._several = pp > 1
        self._schedule = get_forward_backward_func(pp_size=pp, vp_size=len(stages) if len(stages) > 1 else None)

    def passes(self, budget: int) -> Passes:
        """Return its passes, with micro-batches of at most `budget` tokens."""
        return Passes(self._words, self, budget, self._world, self._split)

    def __call__(self, batch: Batch, micros: Sequence[MicroBatch]) -> Iterator[Tensor]:
        """Yield the model's predictions for each micro-batch's targets, float32[targets], on every rank."""
        with torch.no_grad():
            said = self._run(batch, micros, None)
        if self._several:
            counts = [len(micro.target) for micro in micros]
            there = torch.cat(said) if said else torch.empty(sum(counts), device=self._world.device)
            dist.broadcast(there, src=self._world.last, group=self._world.groups.pp)
            said = list(there.split(counts))
        return iter(said)

    def train(self, batch: Batch, micros: Sequence[MicroBatch], judged: Judged) -> None:
        """Leave the gradients of the summed loss in the stages, summed over the ranks that share parameters.

        Only the last stage calls `judged`, on all ranks along `cp` and `tp`, with whole micro-batches.
        """
        self._run(batch, micros, judged)

    def _run(self, batch: Batch, micros: Sequence[MicroBatch], judged: Judged | None) -> list[Tensor]:
        if not micros:  # on no rank
            return []
        steps = [self._prepared(batch, micro) for micro in micros]
        several = len(self._stages) > 1
        data = [iter(steps) for _ in self._stages]
        communicator = P2PCommunicator(self._world.groups.pp, self._config) if self._several else None
        with quiet():
            outputs = self._schedule(
                forward_step_func=partial(_forward, judged),
                data_iterator=data if several else data[0],
                model=self._stages if several else self._stages[0],
                num_microbatches=len(micros),
                seq_length=1,  # each micro-batch has its own
                micro_batch_size=1,
                forward_only=judged is None,
                collect_non_loss_data=judged is None,
                p2p_communicator=communicator,
                pg_collection=self._world.groups,
            )
        return cast("list[Tensor]", outputs)

    def _prepared(self, batch: Batch, micro: MicroBatch) -> _Step:
        world = self._world
        multiple = world.grid.sizes["tp"] if self._config.sequence_parallel else 1
        part = part_of(micro, world.grid.place["cp"], world.grid.sizes["cp"], multiple)
        there = part.to(world.device)
        there = replace(there, attend=there.attend.by(self._words.kernel))
        if self._valued or not world.is_last_stage:
            return micro, there, None
        target = micro.target[part.target.numpy()]
        chosen = moved(torch.from_numpy(batch.tokens.values[target].astype(np.int64)), world.device)
        return micro, there, Asked(chosen, temperatures(batch, target, world.device))


def _forward(judged: Judged | None, data: Iterator[_Step], stage: nn.Module) -> tuple[Tensor, Callable[..., object]]:
    micro, part, asked = next(data)
    return stage(part, asked), partial(_told, judged, micro)


def _told(judged: Judged | None, micro: MicroBatch, said: Tensor, **_: bool) -> object:
    """Return what Megatron expects of the last stage: the values as they are, or loss, its count and nothing."""
    if judged is None:
        return said
    return judged(said, micro), torch.ones((), dtype=torch.int), {}
