from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from tests.backends.material import SHAPE

OWN: dict[str, Any] = {**SHAPE, "max_position_embeddings": 40, "tie_word_embeddings": False, "initializer_range": 0.15}
SHAPES: Mapping[str, PretrainedConfig] = {
    "grouped": LlamaConfig(**OWN),
    "mixture": Qwen3MoeConfig(
        **OWN, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
}
"""Fewer heads of keys than of queries and a head of their own; of the mixture, two of four experts for each token."""


@pytest.fixture(scope="session")
def folder_of(
    random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str | None]:
    """`folder_of("grouped")`: the folder of a model by its name; None of the suite's own, `small`."""

    @cache
    def folder(name: str) -> str | None:
        return None if name == "small" else random_model(SHAPES[name], tmp_path_factory.mktemp(name), noise=0)

    return folder
