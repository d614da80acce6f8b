"""The quickstart's own configurations, cut short, on the real torch backend."""

import json
from pathlib import Path

import pytest

from meshrl.cli import main

_SHORT = ("task.held_out=32", "task.options.size=2000", "run.meshes.main={ranks=1,cpus=1}")


def run(config: str, *overrides: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", config, *overrides])
    assert ended.value.code == 0


def records(folder: Path) -> list[dict[str, float]]:
    """What a run computed, without how long it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "step_s")} for line in lines]


@pytest.mark.bits
def test_the_quickstart_learns_and_a_seed_decides_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    """Also on Ray: the engine is in no number."""
    monkeypatch.chdir(tmp_path)
    run("sft/quickstart", *_SHORT, "steps=8", "policy.optimizer.warmup_steps=2")
    sft = records(Path("runs/quickstart-sft"))
    assert sft[-1]["loss"] < sft[0]["loss"] - 0.2

    for name, engine in {"one": "local", "two": "local", "three": "ray"}.items():
        run("grpo/quickstart", *_SHORT, "steps=3", "prompts=4", f"run.name={name}", f"run.engine={engine}")
    one, two, three = Path("runs/one"), Path("runs/two"), Path("runs/three")
    assert records(one) == records(two) == records(three)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (one, two, three)]
    assert weights[0] == weights[1] == weights[2]

    summary = json.loads((one / "summary.json").read_bytes())
    assert summary["status"] == "finished"
    assert {"exact_match_before", "exact_match_after", "wall_s", "tokens", "first_reward"} <= set(summary)
    samples = [json.loads(line) for line in (one / "samples.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "completion", "reward", "answer"} <= set(samples[0])
