"""The quickstart of Megatron-Core, cut short: three roles in three layouts, in the same two processes."""

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


ONE = ("run.engine=local", "run.meshes.main.ranks=1", "policy.backend=torch", "policy.axes={dp=1}")
"""For what only makes a model to begin with: here, and no further processes."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_layouts_train_in_the_same_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("sft/quickstart-megatron", "rows=16", "steps=8", "policy.optimizer.warmup_steps=2", *ONE)
    warm = records("quickstart-megatron-sft")
    assert warm[-1]["loss"] < warm[0]["loss"] - 0.2

    run("ppo/quickstart-megatron", "prompts=8", "steps=5")
    for saved in "model", "critic":
        assert Path("runs/quickstart-megatron", saved, "model.safetensors").exists()
    steps = records("quickstart-megatron")
    assert len(steps) == 5
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert max(step["sampler_difference"] for step in steps) < 1e-5
    assert {"reward", "kl", "critic_loss", "critic_explained_variance"} <= set(steps[0])
