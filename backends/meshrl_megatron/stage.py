"""A stage of the pipeline: Megatron's GPTModel over packed sequences, which ends in log-probs, values or scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshrl.algo import Predicts
from meshrl_megatron.core import (
    ColumnParallelLinear,
    GPTModel,
    ProcessGroupCollection,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from meshrl_megatron.layers import FusedLinear, Packing, assembled, layer_spec, modules_of
from meshrl_megatron.parts import Part
from meshrl_megatron.shape import Decoder
from meshrl_megatron.vocabulary import logprobs
from meshrl_torch.model.network import MAX_LOGITS

_SPLIT: Final[Mapping[type[nn.Module], int]] = {
    ColumnParallelLinear: 0,
    FusedLinear: 0,
    RowParallelLinear: 1,
    VocabParallelEmbedding: 0,
}
"""For each module, the dim of its weight that is divided over ranks along tp."""
_HEADS: Final[Mapping[Predicts, str]] = {"values": "value_head", "scores": "score"}
"""Names of heads of one number."""


@dataclass(frozen=True)
class Asked:
    """The request to the last stage for a part: the tokens whose log-probs it returns.

    There is none for a head of one number.
    """

    chosen: Tensor
    """int64[n], one for each target of the part."""
    temperature: Tensor | None
    """float32[n]."""


class Stage(GPTModel):
    """Some layers of a decoder. The first stage has the embeddings, the last one the head."""

    def __init__(  # noqa: PLR0913, PLR0917 - as many facts as Megatron asks for
        self,
        config: TransformerConfig,
        shape: Decoder,
        groups: ProcessGroupCollection,
        rotary: nn.Module,
        number: int | None,
        layers: int,
        first: bool,
        last: bool,
        predicts: Predicts,
    ) -> None:
        """`number`: among this rank's stages, if it has several. `layers`: in this one.

        `rotary`: transformers' module of the model, which computes cosines and sines of positions. `predicts`: if not
        "logprobs", the last stage ends in a linear head of one number instead of the model's own. A critic's is
        float32. That of scores has no bias and the model's dtype, as in a classifier's folder.
        """
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                [layer_spec(config, groups.tp)] * layers, modules_of(config.transformer_impl).norm
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
        self.first_layer = self.decoder.layers[0].layer_number - 1
        self._shape, self._tp, self._cp = shape, groups.tp, groups.cp
        self._sequence_parallel = config.sequence_parallel
        self._predicts: Predicts = predicts
        for module in self.modules():
            if type(module) in _SPLIT and isinstance(module.weight, Tensor):
                # Megatron marks only weights that it has initialised.
                set_tensor_model_parallel_attributes(module.weight, True, _SPLIT[type(module)], 1)
        if last and predicts != "logprobs":
            del self.output_layer
            is_score = predicts == "scores"
            dtype = config.params_dtype if is_score else torch.float32
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.add_module(_HEADS[predicts], nn.Linear(shape.hidden, 1, bias=not is_score, device=device, dtype=dtype))

    def forward(self, part: Part, asked: Asked | None) -> Tensor:
        """Return hidden states [tokens, 1, hidden], or at last the predictions for all targets, float32[targets]."""
        states = self.embedding(input_ids=part.ids, position_ids=part.positions) if self.pre_process else None
        like = torch.empty(0, dtype=self.config.params_dtype, device=part.ids.device)
        cos, sin = self.rotary(like, part.positions)
        packing = Packing(attend=part.attend, cos=cos, sin=sin)
        states = self.decoder(hidden_states=states, attention_mask=None, packed_seq_params=packing)
        if not self.post_process:
            return states
        own = self._said(states, part, asked)
        if self._cp.size() == 1:
            return own
        return assembled(own, part.target, part.targets, self._cp)

    def _said(self, states: Tensor, part: Part, asked: Asked | None) -> Tensor:
        if self._sequence_parallel:
            states = gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=asked is not None, group=self._tp
            )
        elif asked is not None:
            states = copy_to_tensor_model_parallel_region(states, group=self._tp)
        there = states[:, 0].index_select(0, part.source)
        if asked is None:
            head = cast("nn.Linear", self.get_submodule(_HEADS[self._predicts]))
            bias = cast("Tensor | None", head.bias)
            return functional.linear(there.float(), head.weight.float(), None if bias is None else bias.float())[:, 0]
        return self._logprobs(there, asked)

    def _logprobs(self, states: Tensor, asked: Asked) -> Tensor:
        """Return float32[n] from [n, hidden]. Many are computed in chunks, and again in the backward pass."""
        weight = self.shared_embedding_or_output_weight() if self._shape.tied else self.output_layer.weight
        rows = max(1, MAX_LOGITS // len(weight))
        if len(states) <= rows:
            return self._chosen(states, weight, asked.chosen, asked.temperature)
        pieces: list[Tensor] = []
        for start in range(0, len(states), rows):
            span = slice(start, start + rows)
            scale = None if asked.temperature is None else asked.temperature[span]
            pieces.append(
                cast(
                    "Tensor",
                    checkpoint(self._chosen, states[span], weight, asked.chosen[span], scale, use_reentrant=False),
                )
            )
        return torch.cat(pieces)

    def _chosen(self, states: Tensor, weight: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
        first = self._tp.rank() * len(weight)
        known = min(len(weight), max(0, self._shape.vocabulary - first))
        return logprobs(functional.linear(states, weight), chosen, temperature, self._tp, first, known)
