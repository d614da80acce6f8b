"""Pack rows into micro-batches of equal duration, and run them through the pipeline by Megatron's schedules."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from meshrl.data import Batch, Ragged
from meshrl_megatron.core import P2PCommunicator, get_forward_backward_func, quiet
from meshrl_megatron.model import Model
from meshrl_megatron.parts import Part, part_of
from meshrl_megatron.shape import Decoder
from meshrl_megatron.stage import Targets
from meshrl_torch.estimate.flops import layer_flops
from meshrl_torch.model.attention import moved
from meshrl_torch.model.packing import MicroBatch, Rows, packed
from meshrl_torch.model.scoring import Passes, temperatures

Ints = NDArray[np.int64]

_FILLED = 4
"""Micro-batches for each stage, if there are enough rows. The pipeline then idles for a fifth of the time."""
Judged: TypeAlias = Callable[[Tensor, MicroBatch], Tensor]
"""A micro-batch's part of the loss, float32[], from the model's predictions for its targets."""
_Step: TypeAlias = tuple[MicroBatch, Part, Targets | None]


@dataclass(frozen=True)
class Balance:
    """Divides rows by the work of a layer: matrices for each token, attention for each pair of tokens.

    Families share their prompt, so they stay together unless they are too large.
    """

    per_token: float
    """Multiplications and additions of a layer for each token."""
    per_pair: float
    """The same for a query and a key that it sees."""
    fewest: int
    """Fewest micro-batches, if there are as many families."""

    @classmethod
    def of(cls, shape: Decoder, stages: int) -> "Balance":
        """Make it for a decoder in this many stages."""
        token, pair = layer_flops(shape.hidden, shape.heads, shape.groups, shape.head_dim, shape.ffn_of_a_token)
        return cls(token, pair, _FILLED * stages if stages > 1 else 1)

    def __call__(self, tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
        """Yield micro-batches of at most `budget` tokens. A longer row gets its own."""
        for part in self._parts(rows, budget):
            yield packed(tokens, rows, part, learn)

    def _parts(self, rows: Rows, budget: int) -> list[Ints]:
        lots = [lot for family in _families(rows) for lot in _lots(rows, family, budget)]
        if not lots:
            return []
        sizes = [_tokens(rows, lot) for lot in lots]
        works = [self.work(rows, lot) for lot in lots]
        count = max(-(-sum(sizes) // budget), min(self.fewest, len(lots)))
        bins: list[tuple[float, int]] = [(0.0, number) for number in range(count)]
        filled = [0] * count
        members: list[list[Ints]] = [[] for _ in range(count)]
        for number in sorted(range(len(lots)), key=lambda each: -works[each]):  # the longest first, to the least filled
            tried: list[tuple[float, int]] = []
            while bins and filled[bins[0][1]] and filled[bins[0][1]] + sizes[number] > budget:
                tried.append(heapq.heappop(bins))
            work, where = heapq.heappop(bins) if bins else (0.0, len(filled))
            if where == len(filled):
                filled.append(0)
                members.append([])
            filled[where] += sizes[number]
            members[where].append(lots[number])
            for each in (*tried, (work + works[number], where)):
                heapq.heappush(bins, each)
        return [np.sort(np.concatenate(each)) for each in members if each]

    def work(self, rows: Rows, lot: Ints) -> float:
        """Multiplications and additions of a layer for some rows of one family."""
        prefix = int(rows.prefix[lot[0]])
        own = rows.inputs[lot] - rows.prefix[lot]
        pairs = float((own * rows.prefix[lot] + own * (own + 1) / 2).sum()) + prefix * (prefix + 1) / 2
        return self.per_token * _tokens(rows, lot) + self.per_pair * pairs


def _families(rows: Rows) -> list[Ints]:
    """Return the rows of each family, numbers of `rows`."""
    order = np.argsort(rows.family, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(rows.family[order])) + 1) if len(order) else []


def _tokens(rows: Rows, lot: Ints) -> int:
    return int((rows.inputs[lot] - rows.prefix[lot]).sum() + rows.prefix[lot[0]])


def _lots(rows: Rows, family: Ints, budget: int) -> Iterator[Ints]:
    """Divide a family into lots of at most `budget` tokens, each with its copy of the prompt."""
    start, filled = 0, int(rows.prefix[family[0]])
    for number, own in enumerate((rows.inputs[family] - rows.prefix[family]).tolist()):
        if number > start and filled + own > budget:
            yield family[start:number]
            start, filled = number, int(rows.prefix[family[0]])
        filled += own
    yield family[start:]


class Pipeline:
    """The stages of a model on this rank, and on the other ranks along `pp`."""

    def __init__(self, stages: Sequence[nn.Module], model: Model) -> None:
        """`stages`: the model's stages, or Megatron's wrappers of them."""
        self._stages, self._model, self._world = list(stages), model, model.world
        pp, virtual = model.world.grid.sizes["pp"], len(self._stages)
        self._several, self._split = pp > 1, Balance.of(model.shape, pp * virtual)
        self._reads_targets = model.predicts == "logprobs" and model.world.number == model.world.last
        self._schedule = get_forward_backward_func(pp_size=pp, vp_size=virtual if virtual > 1 else None)

    def passes(self, budget: int) -> Passes:
        """Return its passes, with micro-batches of at most `budget` tokens."""
        return Passes(self._model.words, self, budget, self._world, self._split)

    def __call__(self, batch: Batch, micros: Sequence[MicroBatch]) -> Iterator[Tensor]:
        """Yield the model's predictions for each micro-batch's targets, float32[targets], on every rank."""
        with torch.no_grad():
            outputs = self.run(batch, micros)
        if self._several:
            counts = [len(micro.target) for micro in micros]
            every = torch.cat(outputs) if outputs else torch.empty(sum(counts), device=self._world.device)
            outputs = list(self.from_last(every).split(counts))
        return iter(outputs)

    def from_last(self, values: Tensor) -> Tensor:
        """Replace values of any shape, in place, by those of the pipeline's last stage. All its ranks call together."""
        if self._several:
            dist.broadcast(values, src=self._world.last, group=self._world.groups.pp)
        return values

    def run(self, batch: Batch, micros: Sequence[MicroBatch], judged: Judged | None = None) -> list[Tensor]:
        """Return the last stage's predictions. With `judged`, leave the gradients of the summed loss in the stages.

        They are summed over the ranks that share parameters. Only the last stage calls `judged`, on all ranks along
        `cp` and `tp`, with whole micro-batches.
        """
        if not micros:  # on no rank
            return []
        steps = [self._prepared(batch, micro) for micro in micros]
        several = len(self._stages) > 1
        data = [iter(steps) for _ in self._stages]
        communicator = P2PCommunicator(self._world.groups.pp, self._model.config) if self._several else None
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
        world, model = self._world, self._model
        multiple = world.grid.sizes["tp"] if model.config.sequence_parallel else 1
        own = part_of(micro, world.grid.place["cp"], world.grid.sizes["cp"], multiple)
        part = own.to(world.device)
        part = replace(part, attend=part.attend.by(model.words.kernel))
        if not self._reads_targets:
            return micro, part, None
        target = micro.target[own.target.numpy()]
        chosen = moved(torch.from_numpy(batch.tokens.values[target].astype(np.int64)), world.device)
        return micro, part, Targets(chosen, temperatures(batch, target, world.device))


def _forward(judged: Judged | None, data: Iterator[_Step], stage: nn.Module) -> tuple[Tensor, Callable[..., object]]:
    micro, part, targets = next(data)
    return stage(part, targets), partial(_result, judged, micro)


def _result(judged: Judged | None, micro: MicroBatch, output: Tensor, **_: bool) -> object:
    """Return what Megatron expects of the last stage: the values as they are, or loss, its count and nothing."""
    return output if judged is None else (judged(output, micro), torch.ones((), dtype=torch.int), {})
