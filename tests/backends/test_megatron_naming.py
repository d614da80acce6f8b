"""Parameters of Megatron's stages as rectangles of Hugging Face's tensors."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.errors import ModelError
from meshrl_megatron.naming import Place, Shape, pieces

LAYER = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
NAMES = (
    "embedding.word_embeddings.weight",
    *(f"decoder.layers.1.{name}" for name in LAYER),
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    "value_head.weight",
    "value_head.bias",
    "score.weight",
)


def local_size(name: str, shape: Shape, tp: int) -> tuple[int, ...]:
    """What Megatron-Core makes of it on each rank."""
    heads, groups = shape.heads // tp, shape.groups // tp
    rows = (heads + 2 * groups) * shape.head_dim
    tail = name.removeprefix("decoder.layers.1.")
    return {
        "embedding.word_embeddings.weight": (shape.padded(tp) // tp, shape.hidden),
        "output_layer.weight": (shape.padded(tp) // tp, shape.hidden),
        "self_attention.linear_qkv.weight": (rows, shape.hidden),
        "self_attention.linear_qkv.bias": (rows,),
        "self_attention.q_layernorm.weight": (shape.head_dim,),
        "self_attention.k_layernorm.weight": (shape.head_dim,),
        "self_attention.linear_proj.weight": (shape.hidden, heads * shape.head_dim),
        "mlp.linear_fc1.weight": (2 * shape.ffn // tp, shape.hidden),
        "mlp.linear_fc2.weight": (shape.hidden, shape.ffn // tp),
        "value_head.weight": (1, shape.hidden),
        "value_head.bias": (1,),
        "score.weight": (1, shape.hidden),
    }.get(tail, (shape.hidden,))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, int]:
    tp = draw(st.sampled_from((1, 2, 4)))
    groups = tp * draw(st.integers(1, 3))
    shape = Shape(
        hidden=draw(st.integers(1, 5)),
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=2 * draw(st.integers(1, 3)),
        ffn=tp * draw(st.integers(1, 5)),
        vocabulary=draw(st.integers(1, 17)),
        tied=draw(st.booleans()),
    )
    return shape, tp


@pytest.mark.parametrize("name", NAMES)
@given(shapes())
def test_ranks_hold_each_element_once_and_nothing_but_padding_besides(name: str, drawn: tuple[Shape, int]) -> None:
    shape, tp = drawn
    held: dict[str, Tensor] = {}
    size = local_size(name, shape, tp)
    replicated = size == local_size(name, shape, 1) and tp > 1 and "word_emb" not in name and "output" not in name
    for rank in range(tp):
        local, used = torch.zeros(size), 0
        for piece in pieces(name, shape, Place(rank, tp, 0)):
            view = piece.view(local)
            view += 1
            used += view.numel()
            whole = held.setdefault(piece.name, torch.zeros(piece.size))
            for dim, (start, length) in enumerate(zip(piece.offsets, view.shape, strict=True)):
                whole = whole.narrow(dim, start, length)
            whole += 1
        assert local.sum() == used  # each element of the parameter in one view at most
        assert local.max() <= 1
        if "word_emb" not in name and "output" not in name:
            assert local.min() == 1
    for whole in held.values():
        assert (whole == (tp if replicated else 1)).all()


@given(shapes(), st.sampled_from(("weight", "bias")))
def test_a_ranks_queries_lie_above_its_keys_and_these_above_its_values(drawn: tuple[Shape, int], kind: str) -> None:
    shape, tp = drawn
    tail = (shape.hidden,) if kind == "weight" else ()
    whole = {
        head: torch.rand(count * shape.head_dim, *tail)
        for head, count in (("q", shape.heads), ("k", shape.groups), ("v", shape.groups))
    }
    for rank in range(tp):
        local = torch.cat([each.chunk(tp)[rank] for each in whole.values()])
        for piece in pieces(f"decoder.layers.0.self_attention.linear_qkv.{kind}", shape, Place(rank, tp, 3)):
            head, start = piece.name.removeprefix("model.layers.3.self_attn.")[0], piece.offsets[0]
            assert piece.name == f"model.layers.3.self_attn.{head}_proj.{kind}"
            view = piece.view(local)
            assert torch.equal(view, whole[head][start : start + len(view)])


def test_the_other_parts_are_what_slicing_by_hand_gives() -> None:
    shape = Shape(hidden=3, heads=4, groups=2, head_dim=2, ffn=4, vocabulary=5, tied=False)
    at = Place(tp=1, tp_size=2, first_layer=2)
    gate, up, down = torch.rand(4, 3), torch.rand(4, 3), torch.rand(3, 4)
    embedding = torch.cat([torch.rand(5, 3), torch.full((1, 3), torch.nan)])
    one, two = pieces("decoder.layers.0.mlp.linear_fc1.weight", shape, at)
    local = torch.cat([gate[2:], up[2:]])
    assert (one.name, two.name) == ("model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight")
    assert one.offsets == two.offsets == (2, 0)
    assert torch.equal(one.view(local), gate[2:])
    assert torch.equal(two.view(local), up[2:])
    (columns,) = pieces("decoder.layers.0.mlp.linear_fc2.weight", shape, at)
    assert columns.offsets == (0, 2)
    assert torch.equal(columns.view(down[:, 2:]), down[:, 2:])
    (last,) = pieces("embedding.word_embeddings.weight", shape, at)
    assert (last.size, last.offsets) == ((5, 3), (3, 0))
    assert torch.equal(last.view(embedding[3:]), embedding[3:5])
    assert pieces("output_layer.weight", shape, at)[0].name == "lm_head.weight"


SHAPE = Shape(hidden=16, heads=4, groups=2, head_dim=4, ffn=6, vocabulary=7, tied=False)


@pytest.mark.parametrize(
    ("kind", "tied", "absent"),
    [
        ("llama", False, ("bias", "q_layernorm", "k_layernorm")),
        ("llama", True, ("bias", "q_layernorm", "k_layernorm", "output_layer")),
        ("qwen2", False, ("q_layernorm", "k_layernorm")),
        ("qwen3", False, ("bias",)),
    ],
)
def test_names_and_sizes_are_those_of_transformers(kind: str, tied: bool, absent: tuple[str, ...]) -> None:
    config = AutoConfig.for_model(
        kind,
        hidden_size=SHAPE.hidden,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.groups,
        head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.ffn,
        num_hidden_layers=2,
        vocab_size=SHAPE.vocabulary,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        network = cast("nn.Module", AutoModelForCausalLM.from_config(config))
    names = [name for name in NAMES if not any(each in name for each in ("value_head", "score", *absent))]
    found: dict[str, tuple[int, ...]] = {}
    for first in (-1, 0):  # NAMES has a stage's second layer
        for name in names:
            found |= {each.name: each.size for each in pieces(name, replace(SHAPE, tied=tied), Place(0, 1, first))}
    assert found == {name: tuple(each.shape) for name, each in network.named_parameters()}


def test_a_copy_of_a_tied_embedding_has_the_embeddings_name() -> None:
    tied = Shape(hidden=3, heads=2, groups=2, head_dim=2, ffn=4, vocabulary=5, tied=True)
    for rank in range(2):
        one, two = (
            pieces(name, tied, Place(rank, 2, 0))
            for name in ("embedding.word_embeddings.weight", "output_layer.weight")
        )
        assert [(each.name, each.offsets) for each in one] == [(each.name, each.offsets) for each in two]


def test_an_unknown_parameter_is_told() -> None:
    with pytest.raises(ModelError, match=r"no Hugging Face tensor for the parameter `decoder.layers.0.mlp.gate_bias"):
        pieces("decoder.layers.0.mlp.gate_bias", SHAPE, Place(0, 1, 0))
