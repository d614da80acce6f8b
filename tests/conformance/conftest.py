"""A model that the suite is run with beside its own."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshrl import PolicyConfig
from meshrl.testing.conformance.material import SMALL
from meshrl_torch.policy import TorchPolicy


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with fewer heads of keys than of queries, and a head of its own."""
    folder = tmp_path_factory.mktemp("grouped") / "model"
    TorchPolicy(PolicyConfig(model=SMALL))._model.tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=40,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=1,
            initializer_range=0.15,
        )
    )
    network.save_pretrained(folder)
    return str(folder)
