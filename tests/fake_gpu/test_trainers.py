"""Trainers on fake GPUs: the numbers of the CPU, in both types of floats, and what they leave in a GPU's memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshrl import ClippedLoss, PolicyConfig, Run, RunConfig
from meshrl.errors import RankFailed
from meshrl.roles import Policy
from meshrl.run import MeshConfig
from tests.backends.material import MODEL, rollouts

NO_GPU = """
import asyncio, sys
from tests.fake_gpu.test_trainers import trained
print(asyncio.run(trained(sys.argv[1])))
"""


async def trained(folder: str, ranks: int = 1, gpus: int = 0, **changes: object) -> list[tuple[float, float]]:
    """Train for two steps. Returns each step's loss and norm of gradients."""
    mesh = MeshConfig(ranks=ranks, cpus=1, gpus=gpus)
    table = {"model": MODEL, "backend": "fsdp", "mesh": "train", "micro_batch_tokens": 64, **changes}
    engine = "processes" if gpus else "local"
    async with Run(RunConfig(folder=folder, name="run", engine=engine, meshes={"train": mesh})) as run:
        policy = await run.spawn(Policy, PolicyConfig.model_validate(table))
        steps = [(await policy.update(rollouts(24, seed=seed), ClippedLoss())).means() for seed in range(2)]
        await policy.weights()
    return [(float(step["loss"]), float(step["grad_norm"])) for step in steps]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """The numbers of a process without GPUs."""
    told = subprocess.run(
        [sys.executable, "-c", NO_GPU, str(tmp_path_factory.mktemp("cpu"))],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    numbers: list[tuple[float, float]] = eval(told.stdout.splitlines()[-1])  # noqa: S307 -- its own output
    return numbers


@pytest.mark.parametrize(("backend", "ranks"), [("fsdp", 1), ("fsdp", 2), ("megatron", 2)])
async def test_they_compute_the_same_as_on_a_cpu(
    backend: str, ranks: int, expected: list[tuple[float, float]], tmp_path: Path
) -> None:
    tolerance = 1e-5 if backend == "fsdp" else 1e-3  # what is expected is of FSDP
    for found, wanted in zip(await trained(str(tmp_path), ranks, gpus=1, backend=backend), expected, strict=True):
        assert found == pytest.approx(wanted, rel=tolerance)


async def test_published_weights_leave_a_gpu_to_the_engine_that_wakes(tmp_path: Path) -> None:
    kept = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del kept  # torch keeps their memory, as that of an update
    before = torch.cuda.memory_reserved()
    await trained(str(tmp_path), dtype="bfloat16")
    assert torch.cuda.memory_reserved() <= before // 2  # cuBLAS has its workspace in one of them


async def test_a_driver_that_is_older_than_the_wheel_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRIVER", "12040")
    with pytest.raises(RankFailed, match=r"its wheel is for CUDA 13.0, the driver supports CUDA up to 12.4"):
        await trained(str(tmp_path), ranks=2, gpus=1)
