import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import AutoConfig

from meshrl.planning import simulate_job
from meshrl.run import load_job, plan_memory, shipped_configs
from meshrl_inference.memory import weight_bytes
from tests.first_hour.chat_model import save_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES: Mapping[str, str] = {
    "grpo/qwen3-0.6b-1gpu": "Qwen/Qwen3-0.6B",
    "grpo/qwen3-4b-8gpu": "Qwen/Qwen3-4B",
    "grpo/qwen3-32b-64gpu": "Qwen/Qwen3-32B",
    "grpo/qwen3-30b-a3b-64gpu": "Qwen/Qwen3-30B-A3B",
}


def save_models(folder: Path) -> None:
    for model in RECIPES.values():
        own = folder / model
        own.mkdir(parents=True)
        shutil.copy(ROOT / "tests/data/models" / own.name.lower() / "config.json", own)
        save_tokenizer(own)


def tell() -> None:
    """In a process of its own, that is in no process group: what the recipes take."""
    found: dict[str, object] = {}
    for name in RECIPES:
        made = load_job(shipped_configs()[name], [])
        meshes = plan_memory(made.config, made.run).meshes
        found[name] = [{**asdict(mesh), "headroom": mesh.headroom, "unknown": mesh.unknown} for mesh in meshes]
    json.dump(found, sys.stdout)


def test_recipes_run_in_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in RECIPES:
        made = load_job(shipped_configs()[name], ["steps=5", "task.options.size=6000"])
        assert simulate_job(made, rollout=40, train=25).step_seconds > 0, name


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.wide
def test_recipes_leave_a_twentieth_of_each_gpu_and_divide_their_models_over_their_ranks(tmp_path: Path) -> None:
    save_models(tmp_path)
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.backends.test_recipes import tell; tell()"
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False, text=True)
    assert not answer.returncode, answer.stderr
    for name, meshes in json.loads(answer.stdout).items():
        for mesh in meshes:
            assert mesh["unknown"] == [], name
            assert mesh["headroom"] > 0.05 * mesh["gib"] * 2**30, (name, mesh["mesh"])
        shape = AutoConfig.from_pretrained(ROOT / "tests/data/models" / RECIPES[name].partition("/")[2].lower())
        parameters = weight_bytes(shape, 1, "")
        policy, mesh = next((role, mesh) for mesh in meshes for role in mesh["roles"] if role["role"] == "policy")
        if policy["backend"] == "megatron":
            experts = 3 * shape.num_hidden_layers * shape.num_experts * shape.moe_intermediate_size * shape.hidden_size
            split = mesh["axes"]["tp"]
            own = 2 * ((parameters - experts) / split + experts / (4 * split))
        else:
            own = 4 * parameters / mesh["ranks"]
        (held,) = [term["nbytes"] for term in policy["memory"]["terms"] if term["name"] == "parameters"]
        assert held == pytest.approx(own, rel=0.01), name
