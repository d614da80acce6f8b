"""Trainers on fake GPUs: the numbers of the CPU, in both types of floats, and what they leave in a GPU's memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from meshrl import Actor, ClippedLoss, Mesh, PolicyConfig, Resources, Run, RunConfig, endpoint
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import RankFailed
from meshrl.mesh import Same
from meshrl.roles import Policy
from meshrl.run import MeshConfig
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.wire.bucket_server import Slots
from tests.backends.material import MODEL, rollouts


class Case(NamedTuple):
    """A layout, whose numbers on GPUs are to be those of one CPU."""

    ranks: int
    changes: dict[str, Any]
    tolerance: float = 1e-5
    engine: Literal["processes", "ray"] = "processes"


CASES = {
    "one GPU": Case(1, {}),
    "plain": Case(2, {}),
    "ray": Case(2, {}, engine="ray"),
    "bfloat16": Case(2, {"dtype": "bfloat16"}, 2e-2),  # the attention of packed rows has another order of sums
    "parameters in the host": Case(2, {"fsdp": {"cpu_offload": True}}),
    "moments in the host": Case(2, {"fsdp": {"offload_moments": True}}),
    "gradients once": Case(2, {"fsdp": {"gradient_sync": "last"}}),
    "blocks stay whole": Case(2, {"fsdp": {"reshard_after_forward": False}}),
    "blocks ahead, computed again": Case(2, {"fsdp": {"prefetch": 1}, "activation_checkpointing": True}),
    "replicas": Case(2, {"fsdp": {"replicate": 2}}),
    "tp": Case(2, {"axes": {"dp": 1, "tp": 2}}),
    "adapters": Case(2, {"lora": {"rank": 4}}),
    "Megatron": Case(2, {"backend": "megatron"}, 1e-3),
    "Megatron, tp": Case(2, {"backend": "megatron", "axes": {"dp": 1, "tp": 2}}, 1e-3),
    "Megatron, pp": Case(2, {"backend": "megatron", "axes": {"dp": 1, "pp": 2}}, 1e-3),
    "Megatron, cp": Case(2, {"backend": "megatron", "axes": {"dp": 1, "cp": 2}}, 1e-3),
}


async def trained(
    folder: Path,
    ranks: int = 1,
    gpus: int = 0,
    axes: Mapping[str, int] | None = None,
    engine: Literal["processes", "ray"] = "processes",
    **changes: object,
) -> list[tuple[float, float]]:
    """Train for two steps. Returns each step's loss and norm of gradients. Without `gpus`, ranks see none."""
    mesh = MeshConfig(ranks=ranks, cpus=0, gpus=gpus, axes=dict(axes or {}))
    table = {"model": MODEL, "backend": "fsdp", "mesh": "train", "micro_batch_tokens": 64, **changes}
    config = RunConfig(folder=str(folder), name="run", engine=engine, meshes={"train": mesh})
    async with Run(config) as run:
        policy = await run.spawn(Policy, PolicyConfig.model_validate(table))
        steps = [(await policy.update(rollouts(24, seed=seed), ClippedLoss())).means() for seed in range(2)]
        await policy.weights()
    return [(float(step["loss"]), float(step["grad_norm"])) for step in steps]


on_a_cpu: dict[str, list[tuple[float, float]]] = {}
"""The numbers of one rank that sees no GPU, by what changes them."""


@pytest.mark.parametrize("name", CASES)
async def test_they_compute_the_same_as_a_cpu(name: str, tmp_path: Path) -> None:
    ranks, changes, tolerance, engine = CASES[name]
    plain = {key: changes[key] for key in ("dtype", "lora") if key in changes}
    if str(plain) not in on_a_cpu:
        on_a_cpu[str(plain)] = await trained(tmp_path / "cpu", **plain)
    found = await trained(tmp_path / "gpus", ranks, gpus=1, engine=engine, **changes)
    for step, wanted in zip(found, on_a_cpu[str(plain)], strict=True):
        assert step == pytest.approx(wanted, rel=tolerance)


def grows(tensor: torch.Tensor) -> bool:
    """True if the segment of a tensor does."""
    (found,) = (
        each for each in torch.cuda.memory_snapshot() if 0 <= tensor.data_ptr() - each["address"] < each["total_size"]
    )
    return bool(found["is_expandable"])


class Allocates(Actor):
    @endpoint
    async def growing(self) -> Same[tuple[bool, bool]]:
        """Return whether segments of buckets grow, and those of other tensors, once there is a policy."""
        policy = FsdpPolicy(PolicyConfig(model=MODEL))
        buckets = Slots(3, 64 << 20, torch.device("cuda"), shared=True).tensor
        other = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del policy
        return grows(buckets), grows(other)


@pytest.mark.parametrize(("given", "expected"), [(None, True), ("max_split_size_mb:64", False)])
async def test_memory_grows_where_a_trainer_allocates_but_not_where_others_open_it(
    given: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    engine = ProcessEngine()  # an allocator is a process's, for its life
    try:
        mesh = await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=1))
        assert await (await mesh.spawn(Allocates)).growing() == (False, expected)
    finally:
        await engine.close()


async def test_whole_weights_leave_a_gpu_without_a_copy_that_the_host_waits_for() -> None:
    from tests.support.fake_cuda import numbers  # noqa: PLC0415 -- of the fake alone

    policy = FsdpPolicy(PolicyConfig(model=MODEL))
    known = (await policy.weights()).fingerprint()
    numbers.waits.clear()
    with numbers.watch():
        assert (await policy.weights()).fingerprint() == known
    assert not [place for what, place in numbers.waits if "pageable" in what and "transfer.py" in place]


async def test_published_weights_leave_a_gpu_to_the_engine_that_wakes() -> None:
    policy = FsdpPolicy(PolicyConfig(model=MODEL, dtype="bfloat16"))
    kept = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del kept  # torch keeps their memory, as that of an update
    before = torch.cuda.memory_reserved()
    await policy.weights()
    assert torch.cuda.memory_reserved() <= before // 2  # cuBLAS has its workspace in one of them


async def test_a_driver_that_is_older_than_the_wheel_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRIVER", "12040")
    with pytest.raises(RankFailed, match=r"its wheel is for CUDA 13.0, the driver supports CUDA up to 12.4"):
        await trained(tmp_path, ranks=2, gpus=1)
