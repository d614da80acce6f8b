from pathlib import Path

import pytest
from transformers import GPTJConfig, LlamaConfig

from meshrl import SamplerConfig
from meshrl.roles import function_of

REGISTRY = '_MODELS = {\n    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),\n}\n'
MODULE = "class LlamaForCausalLM: ...\n\nEntryClass = [\n    LlamaForCausalLM,\n    Phi3ForCausalLM,\n]\n"
SOURCES = {"vllm": ("model_executor/models/registry.py", REGISTRY), "sglang": ("srt/models/llama.py", MODULE)}
"""As the installed engines have them."""


@pytest.mark.parametrize("backend", SOURCES)
def test_an_engine_without_a_models_class_is_named_before_it_starts(backend: str, tmp_path: Path) -> None:
    name, text = SOURCES[backend]
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text, "utf-8")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}\n", "utf-8")
    python.chmod(0o755)
    reads = function_of(backend, "READS")
    assert reads
    for config, architecture, wanted in (
        (LlamaConfig(), "LlamaForCausalLM", "packed"),
        (GPTJConfig(), "GPTJForCausalLM", f"{backend} has no GPTJForCausalLM"),
    ):
        config.architectures = [architecture]
        config.save_pretrained(tmp_path / architecture)
        table = {"model": str(tmp_path / architecture), "backend": backend, backend: {"python": str(python)}}
        assert str(reads(SamplerConfig.model_validate(table))).endswith(wanted)
