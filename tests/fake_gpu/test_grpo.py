"""A run of GRPO as it ships: the losses of a CPU, on one GPU and on two."""

from pathlib import Path

import pytest

from tests.algorithms.pages import run_page
from tests.algorithms.test_on_torch import GROUP, POLICY, letter_b


async def losses(folder: Path, backend: str, ranks: int, gpus: float) -> list[float]:
    folder.mkdir()
    table = {
        **letter_b(folder),
        **GROUP,
        "steps": 5,
        "policy": {**POLICY, "optimizer": {"lr": 1e-3}, "backend": backend},
    }
    mesh = {"ranks": ranks, "cpus": 0, "gpus": gpus}
    ran = await run_page("grpo", folder, table, engine="processes", meshes={"main": mesh})
    return [step["loss"] for step in ran.steps]


async def test_five_steps_have_the_losses_of_a_cpu(tmp_path: Path) -> None:
    expected = await losses(tmp_path / "cpu", "torch", 1, 0)
    assert len(expected) == 5
    for backend, ranks, gpus in (("fsdp", 1, 0), ("fsdp", 1, 1), ("fsdp", 2, 1)):
        found = await losses(tmp_path / f"{backend}-{ranks}-{gpus}", backend, ranks, gpus)
        assert found == pytest.approx(expected, abs=1e-5)
