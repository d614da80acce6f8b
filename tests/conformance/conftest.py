"""A model that the suite is run with beside its own."""

from collections.abc import Callable

import pytest
from transformers import LlamaConfig


@pytest.fixture(scope="module")
def grouped(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with fewer heads of keys than of queries, and a head of its own."""
    config = LlamaConfig(
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
    return random_model(config, tmp_path_factory.mktemp("grouped"), noise=0)
