"""The quickstarts' own configurations, cut short, on the real backends."""

import json
import math
from pathlib import Path

import pytest

from tests.algorithms.pages import lines, meshrl

SHORT = ("task.held_out=32", "task.options.size=2000")
ONE_RANK = "run.meshes.main={ranks=1,cpus=1}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(config: str, *overrides: str) -> None:
    assert meshrl("run", config, *SHORT, *overrides) == 0


def metrics(name: str) -> list[dict[str, float]]:
    """What a run computed, without how long it took."""
    return lines(Path("runs", name, "metrics.jsonl"))


@pytest.mark.bits
@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.wide)])
def test_the_quickstart_learns_and_a_seed_decides_every_bit(engine: str, request: pytest.FixtureRequest) -> None:
    """The engine is in no number. PPO goes on from the same model."""
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    run("sft/quickstart", ONE_RANK, "steps=8", "policy.optimizer.warmup_steps=2")
    sft = metrics("quickstart-sft")
    assert sft[-1]["loss"] < sft[0]["loss"] - 0.2

    for name, where in {"one": "local", "other": engine}.items():
        run("grpo/quickstart", ONE_RANK, "steps=3", "prompts=4", f"run.name={name}", f"run.engine={where}")
    assert metrics("one") == metrics("other")
    weights = [Path("runs", name, "model", "model.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] == weights[1]

    summary = json.loads(Path("runs/one/summary.json").read_bytes())
    assert summary["status"] == "finished"
    assert {"exact_match_before", "exact_match_after", "wall_s", "tokens", "first_reward"} <= set(summary)
    assert {"step", "prompt", "completion", "reward", "answer"} <= set(lines(Path("runs/one/samples.jsonl"))[0])

    run("ppo/quickstart", ONE_RANK, "steps=3", "prompts=8", "ahead=1")
    steps = metrics("quickstart-ppo")
    assert len(steps) == 3
    assert {"sampler_kl", "clip_fraction", "critic_value_clip_fraction", "critic_explained_variance"} <= set(steps[0])


def test_the_quickstart_of_an_agent_goes_on_from_a_model_with_a_chat_template() -> None:
    """Nothing is changed between the warm-up and the agent."""
    small = (ONE_RANK, "task.held_out=4", "steps=2")
    run("sft/agent", *small, "rows=4", "policy.optimizer.warmup_steps=1", "sampling.max_tokens=8")
    template = Path("runs/quickstart-agent-sft/model/chat_template.jinja")
    assert "tool_calls" in template.read_text("utf-8")

    run("agent/quickstart", *small, "prompts=2", "sampling={n=2,max_tokens=8}")
    folder = Path("runs/quickstart-agent")
    summary = json.loads((folder / "summary.json").read_bytes())
    assert {"reward_before", "reward_after", "reward_sampled_before"} <= set(summary)
    steps = metrics("quickstart-agent")
    assert [step["rows"] for step in steps] == [4, 4]
    assert all(step["tokens"] > 4 and step["turns"] >= 1 for step in steps)
    assert {"prompt", "completion", "reward", "answer"} <= set(lines(folder / "samples.jsonl")[0])


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.wide
def test_three_layouts_of_megatron_train_in_the_same_processes() -> None:
    makes_a_model = ("run.engine=local", "run.meshes.main.ranks=1", "policy.backend=torch", "policy.axes={dp=1}")
    run("sft/quickstart-megatron", "rows=16", "steps=8", "policy.optimizer.warmup_steps=2", *makes_a_model)
    run("ppo/quickstart-megatron", "prompts=8", "steps=5")
    assert all(Path("runs/quickstart-megatron", saved, "model.safetensors").exists() for saved in ("model", "critic"))
    steps = metrics("quickstart-megatron")
    assert len(steps) == 5
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert max(step["sampler_difference"] for step in steps) < 1e-5
    assert {"reward", "kl", "critic_loss", "critic_explained_variance"} <= set(steps[0])
