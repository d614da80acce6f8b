"""GRPO and PPO over three hosts: models by FSDP2 on two, samplers on the third. They have the bits of one host."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from meshrl.run import audit_run
from tests.cluster.conftest import TASK
from tests.support.cluster import Cluster

CONFIG = """
steps = 4
prompts = 8
run.samples_every = 1
run.meshes.train = { ranks = 2, axes = { dp = 2 }, cpus = 1 }
run.meshes.rollout = { ranks = 2, cpus = 1 }
policy.optimizer.lr = 1e-2
sampler.mesh = "rollout"
"""
ALGORITHMS = {"grpo": "", "ppo": 'critic = { backend = "fsdp", mesh = "train", optimizer.lr = 1e-2 }\n'}
PLACES = ["run.meshes.train.custom={train=1}", "run.meshes.rollout.custom={rollout=1}"]
"""Two hosts of the fixture have one of `train`, the third has two of `rollout`."""


@pytest.fixture(scope="module")
def own_names(three: Cluster) -> Cluster:
    """Hosts whose own name leads to 127.0.1.1, as Debian's installer writes it."""
    for host in three.hosts:
        host.run(["sh", "-c", f"(echo 127.0.0.1 localhost; echo 127.0.1.1 {host.name}) > /tmp/names"])
        host.run(["mount", "--bind", "/tmp/names", "/etc/hosts"])  # noqa: S108 -- the host's own
    return three


def run(cluster: Cluster, algorithm: str, name: str, *overrides: str) -> None:
    command = ["meshrl", "run", f"{algorithm}.toml", f"run.name={name}", "policy.backend=fsdp", *overrides]
    try:
        cluster.hosts[0].run(command)
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.output) from None


def outcome(folder: Path) -> dict[str, Any]:
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
@pytest.mark.parametrize(("algorithm", "ahead"), [("grpo", 2), ("ppo", 0)])
def test_three_hosts_compute_the_bits_of_one(
    own_names: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, ahead: int
) -> None:
    monkeypatch.chdir(folder)
    config = f'algorithm = "{algorithm}"\n{CONFIG}{TASK}{ALGORITHMS[algorithm]}'
    (folder / f"{algorithm}.toml").write_text(config, "utf-8")
    follows = ["run.deterministic=true"], ["run.replay=runs/three"]
    keeps, follow = follows if ahead else ([], [])
    run(own_names, algorithm, "three", f"ahead={ahead}", f"run.engine={own_names.address}", *PLACES, *keeps)
    run(own_names, algorithm, "one", f"ahead={ahead}", "run.engine=processes", *follow)
    assert {name for name, _ in outcome(folder / "runs/three")["models"]} >= {"model"}
    assert outcome(folder / "runs/three") == outcome(folder / "runs/one")
    assert audit_run(folder / "runs/three").holds
