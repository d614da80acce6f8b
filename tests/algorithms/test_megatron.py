"""The quickstart of Megatron-Core, cut short: three roles in three layouts, in the same two processes of Ray."""

import json
import math
from pathlib import Path

import pytest

from meshrl.cli import main

_SHORT = ("task.held_out=16", "task.options.size=2000")


def run(config: str, *overrides: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", config, *_SHORT, *overrides])
    assert ended.value.code == 0


def records(name: str) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


FOUR = (
    "run.meshes.main.ranks=4",
    "run.meshes.main.cpus=0",
    "policy.axes={dp=2, tp=2}",
    "critic.axes={dp=2, pp=2}",
    "reference.axes={dp=4}",
)
"""As the quickstart, on four processes."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_layouts_train_in_the_same_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    monkeypatch.chdir(tmp_path)
    run("sft/quickstart-megatron", "rows=16", "steps=8", "policy.optimizer.warmup_steps=2")
    warm = records("quickstart-megatron-sft")
    assert warm[-1]["loss"] < warm[0]["loss"] - 0.2

    run("ppo/quickstart-megatron", "prompts=8", "steps=5")
    check(records("quickstart-megatron"), 5)
    for saved in "model", "critic":
        assert Path("runs/quickstart-megatron", saved, "model.safetensors").exists()

    run("ppo/quickstart-megatron", "prompts=8", "steps=2", "run.name=four", *FOUR)
    check(records("four"), 2)


def check(steps: list[dict[str, float]], count: int) -> None:
    assert len(steps) == count
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert max(step["sampler_difference"] for step in steps) < 1e-5
    assert {"reward", "kl", "critic_loss", "critic_explained_variance"} <= set(steps[0])
