"""Names of a stage's parameters, and their places in Hugging Face's tensors.

Separate tensors of Hugging Face are stacked in one parameter here: queries, keys and values, and gate and up. Each rank
of the axis tp holds a part, and the vocabulary is padded. All of it is described as rectangles, so nothing has to be
whole to be read or written.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from torch import Tensor

from meshrl.errors import ModelError

_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-shaped decoder, as in its Hugging Face config."""

    hidden: int
    heads: int
    """Number of query heads."""
    groups: int
    """Number of key and value heads. Each serves heads / groups query heads."""
    head_dim: int
    ffn: int
    """Size of the feed-forward layers, or of each expert."""
    vocabulary: int
    """Rows of the embedding in files, without padding."""
    tied: bool
    """True if the last layer is the embedding."""
    experts: int = field(default=0, kw_only=True)
    """Number of experts of each layer. 0 in a model without experts."""

    def padded(self, tp_size: int) -> int:
        """Return the rows of the embedding on all ranks along tp: the least multiple that holds the vocabulary."""
        return -(-self.vocabulary // tp_size) * tp_size


@dataclass(frozen=True)
class Place:
    """The place of a rank in its model."""

    tp: int
    """Its number on the axis tp."""
    tp_size: int
    first_layer: int
    """The number, in the whole model, of its stage's first layer."""
    first_expert: int = 0
    """The number, in the whole model, of its first expert of each layer."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a Hugging Face tensor that is in a local parameter."""

    name: str
    """The tensor's name in files."""
    size: tuple[int, ...]
    """Size of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the rectangle in the tensor."""
    view: Callable[[Tensor], Tensor]
    """Returns the rectangle in the parameter, or in a tensor of its shape, as a view."""


def pieces(name: str, shape: Shape, place: Place) -> list[Piece]:
    """Return the rectangles that make up a stage's parameter, by its name there. Padding is in none of them.

    Heads, groups and ffn must be divisible by `tp_size`. A parameter that ranks share is whole on each. An expert is
    whole on its rank. ModelError for a parameter that no Llama-shaped model has.
    """
    layer = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(layer[2]) if layer else None
    if expert:
        make = _OF_AN_EXPERT.get(expert[2])
        place = replace(place, first_expert=place.first_expert + int(expert[1]))
    else:
        make = _OF_A_LAYER.get(layer[2]) if layer else _OF_THE_ENDS.get(name)
    if make is None:
        raise ModelError(
            f"the backend 'megatron' knows no Hugging Face tensor for the parameter `{name}`: it reads and writes "
            "Llama, Qwen2, Qwen3 and Qwen3-MoE decoders"
        )
    found = make(shape, place)
    if not layer:
        return found
    prefix = f"model.layers.{place.first_layer + int(layer[1])}."
    return [replace(each, name=prefix + each.name) for each in found]


_Make: TypeAlias = Callable[[Shape, Place], list[Piece]]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _alone(tensor: Tensor) -> Tensor:
    """Return one expert's matrix, in a tensor of several experts'."""
    return tensor[None]


def _rows(start: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(0, start, count)


def _whole(name: str, size: Callable[[Shape], tuple[int, ...]]) -> _Make:
    """A parameter that is the same on all ranks."""
    return lambda shape, _: [Piece(name, size(shape), tuple(0 for _ in size(shape)), _itself)]


def _columns(name: str, width: Callable[[Shape], int]) -> _Make:
    """[hidden, width / tp]."""
    return lambda shape, place: [
        Piece(name, (shape.hidden, width(shape)), (0, place.tp * width(shape) // place.tp_size), _itself)
    ]


def _vocabulary(name: str, shape: Shape, place: Place) -> list[Piece]:
    """[padded / tp, hidden]: the last ranks may hold less of the vocabulary, or none."""
    rows = shape.padded(place.tp_size) // place.tp_size
    first = place.tp * rows
    known = min(rows, shape.vocabulary - first)
    return [Piece(name, (shape.vocabulary, shape.hidden), (first, 0), _rows(0, known))] if known > 0 else []


def _output(shape: Shape, place: Place) -> list[Piece]:
    return _vocabulary("model.embed_tokens.weight" if shape.tied else "lm_head.weight", shape, place)


def _gate_up(shape: Shape, place: Place) -> list[Piece]:
    """[2 * ffn / tp, hidden]: the rank's rows of the gate, then those of up."""
    rows, size = shape.ffn // place.tp_size, (shape.ffn, shape.hidden)
    return [
        Piece(f"mlp.{kind}_proj.weight", size, (place.tp * rows, 0), _rows(number * rows, rows))
        for number, kind in enumerate(("gate", "up"))
    ]


def _expert_gate_up(shape: Shape, place: Place) -> list[Piece]:
    """[2 * ffn, hidden], of one expert: its gate and then up, as in the tensor of all experts."""
    size = (shape.experts, 2 * shape.ffn, shape.hidden)
    return [Piece("mlp.experts.gate_up_proj", size, (place.first_expert, 0, 0), _alone)]


def _expert_down(shape: Shape, place: Place) -> list[Piece]:
    """[hidden, ffn], of one expert."""
    size = (shape.experts, shape.hidden, shape.ffn)
    return [Piece("mlp.experts.down_proj", size, (place.first_expert, 0, 0), _alone)]


def _qkv(kind: str, shape: Shape, place: Place) -> list[Piece]:
    """[(heads + 2 * groups) / tp * head_dim, hidden]: the rank's queries, its keys, its values."""
    tail = (shape.hidden,) if kind == "weight" else ()
    found: list[Piece] = []
    start = 0
    for head, count in (("q", shape.heads), ("k", shape.groups), ("v", shape.groups)):
        rows = count // place.tp_size * shape.head_dim
        size, offsets = (count * shape.head_dim, *tail), (place.tp * rows, *(0 for _ in tail))
        found.append(Piece(f"self_attn.{head}_proj.{kind}", size, offsets, _rows(start, rows)))
        start += rows
    return found


_OF_A_LAYER: Final[Mapping[str, _Make]] = {
    "input_layernorm.weight": _whole("input_layernorm.weight", lambda shape: (shape.hidden,)),
    "self_attention.linear_qkv.weight": partial(_qkv, "weight"),
    "self_attention.linear_qkv.bias": partial(_qkv, "bias"),
    "self_attention.q_layernorm.weight": _whole("self_attn.q_norm.weight", lambda shape: (shape.head_dim,)),
    "self_attention.k_layernorm.weight": _whole("self_attn.k_norm.weight", lambda shape: (shape.head_dim,)),
    "self_attention.linear_proj.weight": _columns(
        "self_attn.o_proj.weight", lambda shape: shape.heads * shape.head_dim
    ),
    "pre_mlp_layernorm.weight": _whole("post_attention_layernorm.weight", lambda shape: (shape.hidden,)),
    "mlp.linear_fc1.weight": _gate_up,
    "mlp.linear_fc2.weight": _columns("mlp.down_proj.weight", lambda shape: shape.ffn),
    "mlp.router.weight": _whole("mlp.gate.weight", lambda shape: (shape.experts, shape.hidden)),
}
_OF_AN_EXPERT: Final[Mapping[str, _Make]] = {
    "linear_fc1.weight": _expert_gate_up,
    "linear_fc2.weight": _expert_down,
}
_OF_THE_ENDS: Final[Mapping[str, _Make]] = {
    "embedding.word_embeddings.weight": partial(_vocabulary, "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _whole("model.norm.weight", lambda shape: (shape.hidden,)),
    "output_layer.weight": _output,
    "value_head.weight": _whole("value_head.weight", lambda shape: (1, shape.hidden)),
    "value_head.bias": _whole("value_head.bias", lambda _: (1,)),
    "score.weight": _whole("score.weight", lambda shape: (1, shape.hidden)),
}
