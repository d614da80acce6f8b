"""The configurations for GPUs: within their GPUs' memory, simulated, and built at their models' real sizes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig

from meshrl import PolicyConfig, ReferenceConfig, RunConfig
from meshrl.roles import Work, options_of
from meshrl.run import Job, load_job, plan_memory, shipped_configs
from meshrl.simulation import simulate_job
from meshrl_inference.memory import parameters_of
from tests.first_hour.chat_model import save_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES: Mapping[str, str] = {
    "grpo/qwen3-0.6b-1gpu": "Qwen/Qwen3-0.6B",
    "grpo/qwen3-4b-8gpu": "Qwen/Qwen3-4B",
    "grpo/qwen3-32b-64gpu": "Qwen/Qwen3-32B",
    "grpo/qwen3-30b-a3b-64gpu": "Qwen/Qwen3-30B-A3B",
}
"""By its name, the model of each."""
FLEET = 64


def save_models(folder: Path) -> None:
    """Write each recipe's model below a folder, under its name on the hub: no weights, and a tokenizer of ours."""
    for model in RECIPES.values():
        own = folder / model
        own.mkdir(parents=True)
        shutil.copy(ROOT / "tests/data/models" / own.name.lower() / "config.json", own)
        save_tokenizer(own)


def job(name: str) -> Job[RunConfig]:
    return load_job(shipped_configs()[name], [], RunConfig)


def tell() -> None:
    """In a process of its own, that is in no process group: what the recipes take, and what is built of them."""
    found: dict[str, object] = {}
    for name in RECIPES:
        made = job(name)
        meshes = [
            {**asdict(mesh), "needed": mesh.needed, "headroom": mesh.headroom, "unknown": mesh.unknown}
            for mesh in plan_memory(made.config, made.run).meshes
        ]
        policy = cast("PolicyConfig", vars(made.config)["policy"])
        mesh = made.run.meshes[policy.mesh]
        axes = dict(mesh.axes) or {"dp": mesh.ranks}
        build = of_megatron if policy.backend == "megatron" else of_fsdp
        wide = {**axes, "dp": FLEET * axes["dp"] // prod(axes.values())}
        found[name] = [meshes, *({"axes": each, **build(policy, each)} for each in (axes, wide))]
    json.dump(found, sys.stdout)


def of_fsdp(config: PolicyConfig, axes: Mapping[str, int]) -> Mapping[str, int]:
    """Numbers of the whole model, and of the first rank's shards."""
    from meshrl_fsdp.memory import _alone, _laid_out  # noqa: PLC0415 -- of the other process alone
    from meshrl_fsdp.options import FsdpConfig  # noqa: PLC0415
    from meshrl_hf.loading import GENERATOR  # noqa: PLC0415
    from meshrl_hf.memory import config_of, depth_of, skeleton_of  # noqa: PLC0415

    shape, layout = config_of(config), options_of(config, FsdpConfig)
    model = skeleton_of(config.model_copy(update={"dtype": "float32"}), shape, GENERATOR, depth_of(shape))
    with _alone(axes, layout) as world:
        shards = [
            cast("Any", each) for each in _laid_out(config, layout, torch.bfloat16, world, model).root.parameters()
        ]
        own = [each.to_local() for each in shards]
    assert {each.device.type for each in own} == {"meta"}
    return {"whole": sum(each.numel() for each in shards), "own": sum(each.numel() for each in own)}


def of_megatron(config: PolicyConfig, axes: Mapping[str, int]) -> Mapping[str, int]:
    """Numbers that the first rank holds."""
    from meshrl_hf.live import Live  # noqa: PLC0415
    from meshrl_hf.memory import fake, rehearsed_alone  # noqa: PLC0415
    from meshrl_megatron.core import fresh_scratch, quiet  # noqa: PLC0415
    from meshrl_megatron.memory import _Plan, _Rank  # noqa: PLC0415
    from meshrl_megatron.options import MegatronConfig  # noqa: PLC0415

    # Its weights alone: buffers of gradients take most of the time, and plan_memory makes those of some layers.
    shared = {name: getattr(config, name) for name in ("model", "backend", "dtype")}
    frozen = ReferenceConfig.model_validate({**shared, "megatron": options_of(config, MegatronConfig)})
    plan = _Plan(frozen, Work(axes, prompt=1, completion=1, rows=1, n=1, gpu=1))
    with rehearsed_alone(0, prod(axes.values())):
        rank = _Rank(plan, plan.grid(0), plan.grid(0).collection(0), plan.shape.layers // plan.pp)
        with quiet(), fresh_scratch(), fake.FakeTensorMode(), Live() as live:
            stage = rank._built(live, torch.nn.Identity()).stage
            return {"own": sum(each.numel() for each in stage.parameters()), "layers": len(stage.decoder.layers)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_models(made)
    return made


@pytest.fixture(scope="module")
def told(folder: Path) -> Any:
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.backends.test_recipes import tell; tell()"
    answer = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=False, text=True)
    assert not answer.returncode, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_script_runs_in_virtual_time(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    made = load_job(shipped_configs()[name], ["steps=8", "task.options.size=6000"], RunConfig)
    assert simulate_job(made, rollout=40, train=25).step_seconds > 0


@pytest.mark.megatron
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_leaves_a_twentieth_of_each_gpu(name: str, told: Any) -> None:
    for mesh in told[name][0]:
        assert mesh["unknown"] == []
        assert mesh["headroom"] > 0.05 * mesh["gib"] * 2**30, mesh["mesh"]


@pytest.mark.megatron
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_model_is_built_whole_on_its_ranks_and_on_64(name: str, told: Any) -> None:
    shape = AutoConfig.from_pretrained(ROOT / "tests/data/models" / RECIPES[name].partition("/")[2].lower())
    parameters = parameters_of(shape)
    for built in told[name][1:]:
        axes = built["axes"]
        if "whole" in built:
            assert built["whole"] == parameters
            assert built["own"] == pytest.approx(parameters / prod(axes.values()), rel=0.01)
        else:
            assert built["layers"] == shape.num_hidden_layers
            experts = 3 * shape.num_hidden_layers * shape.num_experts * shape.moe_intermediate_size * shape.hidden_size
            rest = (parameters - experts) / axes["tp"] + experts / (4 * axes["tp"])
            assert built["own"] == pytest.approx(rest, rel=0.01)
    assert prod(told[name][2]["axes"].values()) == FLEET
