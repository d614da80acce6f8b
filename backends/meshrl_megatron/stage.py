"""A stage of the pipeline: Megatron's GPTModel over packed sequences, which ends in log-probs, values or scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from meshrl.algo import Predicts
from meshrl_megatron import core
from meshrl_megatron.layers import FusedLinear, Packing, assembled, layer_spec, modules_of
from meshrl_megatron.parts import Part
from meshrl_megatron.shape import Decoder
from meshrl_megatron.world import Grid
from meshrl_torch.model.heads import one_number
from meshrl_torch.model.network import in_chunks, to_probabilities

_SPLIT: Final[Mapping[type[nn.Module], int]] = {
    core.ColumnParallelLinear: 0,
    FusedLinear: 0,
    core.RowParallelLinear: 1,
    core.VocabParallelEmbedding: 0,
}
"""For each module, the dim of its weight that is divided over ranks along tp."""
_HEADS: Final[Mapping[Predicts, str]] = {"values": "value_head", "scores": "score"}
"""Names of heads of one number."""


def logprobs(
    logits: Tensor, chosen: Tensor, temperature: Tensor | None, group: ProcessGroup, first: int, known: int
) -> Tensor:
    """Return the log-probability of each chosen token, float32[tokens], the same on all ranks of the group.

    If the logits need a gradient, returns float32[tokens, 2]: also the entropy of the distribution, in nats, without a
    gradient. `logits` is this rank's [tokens, columns] of any dtype, `chosen` int64[tokens] of the whole vocabulary,
    and `temperature` float32[tokens]. The gradient goes to this rank's logits, and is 0 in the columns beyond `known`.
    Each rank must receive the same gradient of the result. On one rank, all bits are those of one log-softmax.
    """
    apply = cast("Callable[[Tensor, Tensor, Tensor | None, ProcessGroup, int, int], Tensor]", _ChosenLogProbs.apply)
    return apply(logits, chosen, temperature, group, first, known)


class _ChosenLogProbs(torch.autograd.Function):
    """Holds one float32 tensor in addition to the logits, which the backward pass turns into their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        chosen: Tensor,
        temperature: Tensor | None,
        group: ProcessGroup,
        first: int,
        known: int,
    ) -> Tensor:
        values = _log_softmax(logits, temperature, group, known)
        mine = (chosen >= first) & (chosen < first + known)
        column = (chosen - first).clamp(0, max(known - 1, 0))[:, None]
        own = values.gather(1, column)[:, 0].where(mine, 0.0) if known else values.new_zeros(len(values))
        if not ctx.needs_input_grad[0]:
            return _sum(own, group)  # all ranks but one add 0
        entropy = to_probabilities(values)
        ctx.save_for_backward(values, column, mine, temperature)
        ctx.dtype, ctx.beyond = logits.dtype, logits.shape[1] - known
        return _sum(torch.stack([own, entropy], 1), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, mine, temperature = ctx.saved_tensors
        given = gradients[0][:, 0]
        own = given if temperature is None else given / temperature
        result = probabilities.mul_(-own[:, None])
        if result.shape[1]:
            result.scatter_add_(1, column, own.where(mine, 0.0)[:, None])
        if ctx.beyond:
            result = functional.pad(result, (0, ctx.beyond))
        return result.to(ctx.dtype), None, None, None, None, None


def _sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def _log_softmax(logits: Tensor, temperature: Tensor | None, group: ProcessGroup, known: int) -> Tensor:
    """Return this rank's columns of the log-softmax over the whole vocabulary, float32[tokens, known]."""
    scaled = logits[:, :known]
    if temperature is not None:
        scaled = scaled / temperature[:, None]  # float32, as temperatures are
    own = scaled.log_softmax(-1, dtype=torch.float32)
    if group.size() == 1:
        return own
    # A row of n logits x with maximum x[m] has log-softmax x[m] - logsumexp(x) there. So the fused kernel above has
    # returned the sum of exp(x - x[m]), without a second tensor of this size.
    if known:
        peak, where = scaled.max(-1, keepdim=True)
        stats = torch.stack([peak[:, 0].float(), -own.gather(1, where)[:, 0]])
    else:
        stats = torch.stack([own.new_full((len(own),), -torch.inf), own.new_zeros(len(own))])
    every = [torch.empty_like(stats) for _ in range(group.size())]
    dist.all_gather(every, stats, group=group)
    peaks, logs = torch.stack(every, 1)
    highest = peaks.amax(0)
    logsum = (peaks - highest + logs).logsumexp(0)
    return own.add_((stats[0] - highest + stats[1] - logsum)[:, None])


@dataclass(frozen=True)
class Targets:
    """The tokens of a part whose log-probs the last stage returns. A head of one number needs none."""

    chosen: Tensor
    """int64[n], one for each target of the part."""
    temperature: Tensor | None
    """float32[n]."""


class Stage(core.GPTModel):
    """Some layers of a decoder. The first stage has the embeddings, the last one the head."""

    def __init__(  # noqa: PLR0913, PLR0917 - as many facts as Megatron asks for
        self,
        config: core.TransformerConfig,
        shape: Decoder,
        groups: core.ProcessGroupCollection,
        rotary: nn.Module,
        number: int | None,
        layers: range,
        first: bool,
        last: bool,
        predicts: Predicts,
    ) -> None:
        """`number`: among this rank's stages, if it has several. `layers`: the numbers of its layers.

        `rotary`: transformers' module of the model, which computes cosines and sines of positions. `predicts`: if not
        "logprobs", the last stage ends in a linear head of one number instead of the model's own. A critic's is
        float32. That of scores has no bias and the model's dtype, as in a classifier's folder.
        """
        super().__init__(
            config=config,
            transformer_layer_spec=core.TransformerBlockSubmodules(
                [layer_spec(config, shape, layer, groups.tp) for layer in layers],
                modules_of(config.transformer_impl).norm,
            ),
            vocab_size=shape.padded(groups.tp.size()),
            max_sequence_length=0,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
            pg_collection=groups,
            vp_stage=number,
        )
        self.rotary = rotary
        self.first_layer = layers.start
        self._shape, self._tp, self._cp = shape, groups.tp, groups.cp
        self._sequence_parallel = config.sequence_parallel
        self._predicts: Predicts = predicts
        for module in self.modules():
            weight = module.weight if type(module) in _SPLIT else None
            if isinstance(weight, Tensor) and not hasattr(weight, "tensor_model_parallel"):
                # Before 0.18 Megatron marks only weights that it has initialised.
                core.set_tensor_model_parallel_attributes(weight, True, _SPLIT[type(module)], 1)
        if last and predicts != "logprobs":
            del self.output_layer
            is_score = predicts == "scores"
            dtype = config.params_dtype if is_score else torch.float32
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.add_module(_HEADS[predicts], nn.Linear(shape.hidden, 1, bias=not is_score, device=device, dtype=dtype))

    def forward(self, part: Part, targets: Targets | None) -> Tensor:
        """Return hidden states [tokens, 1, hidden], or at last the predictions for all targets, float32[targets]."""
        states = self.embedding(input_ids=part.ids, position_ids=part.positions) if self.pre_process else None
        like = torch.empty(0, dtype=self.config.params_dtype, device=part.ids.device)
        turns = self.rotary(like, part.positions)
        if isinstance(turns, Tensor):  # complex numbers, of half of the dims
            turns = [torch.cat([each, each], -1) for each in (turns.real, turns.imag)]
        cos, sin = turns
        packing = Packing(attend=part.attend, cos=cos, sin=sin)
        states = self.decoder(hidden_states=states, attention_mask=None, packed_seq_params=packing)
        if not self.post_process:
            return states
        own = self._predictions(states, part, targets)
        if self._cp.size() == 1:
            return own
        return assembled(own, part.target, part.targets, self._cp)

    def _predictions(self, states: Tensor, part: Part, targets: Targets | None) -> Tensor:
        if self._sequence_parallel:
            states = core.gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=targets is not None, group=self._tp
            )
        elif targets is not None:
            states = core.copy_to_tensor_model_parallel_region(states, group=self._tp)
        states = states[:, 0].index_select(0, part.source)
        if targets is None:
            return one_number(cast("nn.Linear", self.get_submodule(_HEADS[self._predicts])), states)
        weight = self.shared_embedding_or_output_weight() if self._shape.tied else self.output_layer.weight
        compute = partial(self._chosen, weight)
        return in_chunks(compute, len(weight), states, targets.chosen, targets.temperature)

    def _chosen(self, weight: Tensor, states: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
        first = self._tp.rank() * len(weight)
        known = min(len(weight), max(0, self._shape.vocabulary - first))
        return logprobs(functional.linear(states, weight), chosen, temperature, self._tp, first, known)


def stages_of(
    shape: Decoder,
    config: core.TransformerConfig,
    groups: core.ProcessGroupCollection,
    grid: Grid,
    rotary: nn.Module,
    each: int,
    predicts: Predicts,
) -> list[Stage]:
    """Build this rank's stages, `each` of them.

    If each of pp ranks has two, the first has 0 and pp, the last pp - 1 and 2 pp - 1.
    """
    pp, here, layers = grid.sizes["pp"], grid.place["pp"], shape.layers // (grid.sizes["pp"] * each)
    ends = [(here == 0 and number == 0, here == pp - 1 and number == each - 1) for number in range(each)]
    starts = [(number * pp + here) * layers for number in range(each)]
    return [
        Stage(
            config,
            shape,
            groups,
            rotary,
            number if each > 1 else None,
            range(start, start + layers),
            first,
            last,
            predicts,
        )
        for number, (start, (first, last)) in enumerate(zip(starts, ends, strict=True))
    ]
