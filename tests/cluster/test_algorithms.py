"""GRPO and PPO over three hosts: models by FSDP2 on two, samplers on the third. They have the bits of one host."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from meshrl.run import audit_run
from meshrl.testing.cluster import Cluster

CONFIG = """
steps = 4
prompts = 8

[run]
samples_every = 1

[run.meshes.train]
ranks = 2
axes = { dp = 2 }
cpus = 1

[run.meshes.rollout]
ranks = 2
cpus = 1

[task]
source = "words.jsonl"
held_out = 8
held_out_fraction = 0.2

[policy]
backend = "fsdp"
mesh = "train"
model = { characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 2, heads = 2, max_tokens = 16 }

[policy.optimizer]
lr = 1e-2

[sampler]
mesh = "rollout"

[sampling]
n = 4
max_tokens = 5

[reward]
function = "rewards.py:right_letters"
"""
ALGORITHMS = {"grpo": "", "ppo": '[critic]\nbackend = "fsdp"\nmesh = "train"\n[critic.optimizer]\nlr = 1e-2\n'}
"""What each has of its own, after its name."""
REWARD = """
def right_letters(prompt, completion, row):
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""
PLACES = ["run.meshes.train.custom={train=1}", "run.meshes.rollout.custom={rollout=1}"]
"""Two hosts of the fixture have one of `train`, the third has two of `rollout`."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a configuration for each algorithm, its rows and its reward."""
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(100)]
    rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "rewards.py").write_text(REWARD, "utf-8")
    for name, own in ALGORITHMS.items():
        (tmp_path / f"{name}.toml").write_text(f'algorithm = "{name}"\n{CONFIG}\n{own}', "utf-8")
    return tmp_path


def run(cluster: Cluster, algorithm: str, name: str, *overrides: str) -> None:
    """The command on the first host, in the current folder."""
    try:
        cluster.hosts[0].run(["meshrl", "run", f"{algorithm}.toml", f"run.name={name}", *overrides], timeout=150)
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.output) from None


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "metrics": [{key: line[key] for key in line if key not in ("seconds", "step_s")} for line in lines],
        "samples": (folder / "samples.jsonl").read_text("utf-8"),
        "models": {
            (path.parent.name, name): tensor.tobytes()
            for path in sorted(folder.glob("*/model.safetensors"))
            for name, tensor in load_file(path).items()
        },
    }


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ahead", [0, 2])
def test_three_hosts_compute_the_bits_of_one(
    three: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, ahead: int
) -> None:
    """With `ahead` the one follows the schedule of the three."""
    monkeypatch.chdir(folder)
    follows = ["run.deterministic=true"], ["run.replay=runs/three"]
    keeps, follow = follows if ahead else ([], [])
    run(three, algorithm, "three", f"ahead={ahead}", f"run.engine={three.address}", *PLACES, *keeps)
    run(three, algorithm, "one", f"ahead={ahead}", "run.engine=processes", *follow)
    assert {name for name, _ in outcome(folder / "runs/three")["models"]} >= {"model"}
    assert outcome(folder / "runs/three") == outcome(folder / "runs/one")
    assert audit_run(folder / "runs/three").holds
