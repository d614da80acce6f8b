"""The real models in tests/data/models have the sizes that their cards tell."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from meshrl_inference.memory import parameters_of

MODELS = Path(__file__).parents[1] / "data" / "models"
BILLIONS = {
    "llama-8b": (8.03, 0.005),
    "llama-70b": (70.6, 0.05),
    "qwen3-0.6b": (0.6, 0.05),
    "qwen3-4b": (4.0, 0.05),
    "qwen3-32b": (32.8, 0.05),
    "qwen3-30b-a3b": (30.5, 0.05),
}
"""Parameters by the models' cards, and by how much they are rounded."""


def test_models_have_as_many_parameters_as_their_cards_say() -> None:
    assert {folder.name for folder in MODELS.iterdir() if folder.is_dir()} == set(BILLIONS)
    for name, (number, rounding) in BILLIONS.items():
        shape = AutoConfig.from_pretrained(MODELS / name, local_files_only=True)
        assert parameters_of(shape) / 1e9 == pytest.approx(number, abs=rounding), name
