"""Mistakes with the backend `megatron`: models and meshes that it cannot bring together."""

import importlib.util
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

from meshrl import LoraConfig, MeshConfig, NewModel, Policy, PolicyConfig, Run, RunConfig, with_options
from meshrl_megatron.options import MegatronConfig

TINY = NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
ALONE = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}


async def _spawn(config: PolicyConfig, ranks: int = 1) -> None:
    async with Run(RunConfig(meshes={"main": MeshConfig(ranks=ranks)})) as run:
        await run.spawn(Policy, config)


def _divide(model: NewModel, experts: int = 1, **sizes: int) -> None:
    """What each rank of a mesh of these axes does first."""
    from meshrl_hf.loading import load  # noqa: PLC0415 -- brings torch
    from meshrl_megatron.shape import Decoder  # noqa: PLC0415 -- brings Megatron

    config = load(PolicyConfig(model=model)).network.config
    Decoder.of(config, valued=False).check({**ALONE, **sizes}, MegatronConfig(experts=experts))


def experts_over_dp() -> None:
    from meshrl.mesh import Rank  # noqa: PLC0415 -- with what follows it
    from meshrl_megatron.world import World  # noqa: PLC0415 -- brings Megatron

    World.of(Rank(0, 3, {"dp": 0}, {"dp": 3}), 1, 2)


async def _spawn_saved(**changes: object) -> None:
    async with Run(RunConfig()) as run:
        await (await run.spawn(Policy, PolicyConfig(model=TINY))).save("tiny")
    config = Path("tiny/config.json")
    config.write_text(json.dumps({**json.loads(config.read_bytes()), **changes}), "utf-8")
    await _spawn(PolicyConfig(backend="megatron", model="tiny"))


def another_megatron_core() -> None:
    spec = importlib.util.find_spec("meshrl_megatron.core")
    assert spec
    assert spec.loader
    with patch.object(metadata, "version", lambda _: "0.17.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


MISTAKES: dict[str, Callable[[], object]] = {
    "architecture-that-megatron-does-not-know": lambda: _spawn_saved(
        model_type="mistral", architectures=["MistralForCausalLM"]
    ),
    "model-that-megatron-cannot-compute": lambda: _spawn_saved(hidden_act="gelu"),
    "virtual-stages-without-a-pipeline": lambda: _spawn(
        with_options(
            PolicyConfig(backend="megatron", model=TINY.model_copy(update={"layers": 2})),
            MegatronConfig(virtual_stages=2),
        )
    ),
    "axis-that-megatron-does-not-know": lambda: _spawn(
        PolicyConfig(backend="megatron", model=TINY, axes={"dp": 1, "ep": 2}), ranks=2
    ),
    "heads-over-tp": lambda: _divide(TINY, tp=4),
    "experts-of-a-model-without": lambda: _divide(TINY, experts=2, dp=2),
    "layers-over-pp": lambda: _divide(TINY.model_copy(update={"layers": 3}), pp=2),
    "adapters-on-megatron": lambda: _spawn(PolicyConfig(backend="megatron", model=TINY, lora=LoraConfig())),
}
