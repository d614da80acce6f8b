"""Matrices in FP8: how exact they are, and how a policy's ranks send them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from meshrl import PolicyConfig
from meshrl.errors import ConfigError, ModelError
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf import fp8
from meshrl_hf.offer import FP8, SCALE
from meshrl_inference.assembly import read
from meshrl_inference.naming import Naming
from tests.senders import sending

SHAPE: dict[str, Any] = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([1e-40, 1e-3, 1.0, 1e20]))
def test_each_number_is_near_and_each_rows_largest_keeps_its_place(
    rows: int, columns: int, seed: int, size: float
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    numbers, scales = fp8.quantized(matrix)
    assert (numbers.dtype, scales.shape) == (getattr(torch, FP8), (rows, 1))
    back = numbers.double() * scales.double()
    # Half of the last of 3 bits, or of the smallest number.
    assert ((back - matrix).abs() <= (matrix.double().abs() * 2**-4).maximum(scales.double() * 2**-9)).all()
    if size >= 1e-3:
        assert numbers.float().abs().amax(1).tolist() == [448] * rows


def test_rows_of_zeros_stay_zeros_and_scales_are_float32_whatever_the_default_is() -> None:
    numbers, scales = fp8.quantized(torch.tensor([[0.0, 0.0], [1.0, torch.nan]]))
    assert (numbers[0].float() == 0).all()
    assert (scales[0] > 0).all()
    assert (numbers[1].float() * scales[1]).isnan().any()
    matrix = torch.randn(3, 5)
    known = fp8.quantized(matrix)[1]
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        assert torch.equal(fp8.quantized(matrix)[1], known)
    finally:
        torch.set_default_dtype(torch.float32)


def test_they_are_those_of_linear_layers_without_the_head_and_other_models_are_refused(
    random_model: Callable[..., str], tmp_path: Path
) -> None:
    network = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE, **HEADS, tie_word_embeddings=False))
    found = fp8.matrices(network)
    assert "lm_head.weight" in dict(network.named_parameters())
    assert len(found) == 2 * 7
    assert all(".layers." in name and name.endswith("proj.weight") for name in found)
    for tied in (True, False):
        network = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS, tie_word_embeddings=tied))
        assert fp8.refusal(network) == ""
    mixture = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, **HEADS, num_local_experts=4))
    assert "such as model.layers.0.mlp" in fp8.refusal(mixture)
    sizes: dict[str, Any] = {"vocab_size": 11, "n_positions": 48, "n_embd": 16, "n_layer": 1, "n_head": 2}
    gpt2 = random_model(GPT2Config(**sizes, eos_token_id=1), tmp_path)
    config = PolicyConfig(model=gpt2, weight_sync="broadcast", weight_sync_dtype="fp8")
    with pytest.raises(ConfigError, match=r"FP8: 4 of its tensors .*, such as transformer\.h\.0\..*Remove"):
        FsdpPolicy(config)


def test_an_engine_gets_them_with_their_layers_and_others_refuse_them(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, **HEADS)
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    known, naming = dict(network.named_parameters()), Naming(str(tmp_path))
    came: dict[str, torch.Tensor] = {}
    with sending(3, 1 << 14, naming.matrices) as policy:
        weights = policy.offer(known, 1)
        size = sum(each.numel() * (1 if name in naming.matrices else 4) for name, each in known.items())
        scales = sum(len(known[name]) * 4 for name in naming.matrices)
        assert weights.nbytes == size + scales
        outcome = read(weights.offer, 1, naming, torch.device("cpu"), came.clear, came.update)
        assert outcome.way
        for refused in (lambda: weights.pour(known, lambda: None), lambda: weights.tensors):
            with pytest.raises(ModelError, match=r"version 1 come in FP8, .* Remove policy.weight_sync_dtype"):
                refused()
    assert came.keys() == known.keys() | {name + SCALE for name in naming.matrices}
    for name, tensor in known.items():
        if name in naming.matrices:
            numbers, there = fp8.quantized(tensor.detach())
            assert torch.equal(came[name].view(torch.uint8), numbers.view(torch.uint8))
            assert np.array_equal(came[name + SCALE].numpy(), there.numpy())
        else:
            assert torch.equal(came[name], tensor)
