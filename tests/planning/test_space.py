"""What a plan chooses from: each candidate is a configuration that takes all devices."""

from math import prod
from typing import Literal

import pytest

from meshrl.errors import ConfigError
from meshrl.planning.space import Candidate, Devices, Space
from meshrl.run import find_config, load_job

QUICKSTART = find_config("grpo/quickstart")


def space(count: int, kind: Literal["gpus", "cpus"], *given: str, budgets: bool = False) -> list[Candidate]:
    job = load_job(QUICKSTART, given)
    return [*Space(job, Devices(count, kind), (0, 1), budgets=budgets)]


GIVEN: list[tuple[int, Literal["gpus", "cpus"], tuple[str, ...]]] = [
    (3, "cpus", ()),
    (4, "gpus", ("policy.backend=fsdp", "sampler.backend=vllm", "reward.mesh=judge")),
    (4, "gpus", ("policy.backend=megatron", "sampler.mesh=drawn", "run.meshes={drawn={gib=40, gpus=1}}")),
    (2, "cpus", ("run.engine=local", "policy.axes={dp=1}", "sampler.axes={dp=1}")),
]
"""Devices, and settings."""


def test_each_candidate_is_valid_and_takes_all_devices() -> None:
    for count, kind, given in GIVEN:
        candidates = space(count, kind, *given)
        assert len({candidate.name for candidate in candidates}) == len(candidates)
        for candidate in candidates:
            job = load_job(QUICKSTART, [*given, *candidate.overrides(0)])
            taken = sum(
                mesh.ranks * int((mesh.gpus if kind == "gpus" else mesh.cpus) or 0) for mesh in job.run.meshes.values()
            )
            assert taken == count, candidate.name
            policy, sampler = (getattr(job.config, name) for name in ("policy", "sampler"))
            assert (policy.mesh == sampler.mesh) is candidate.shared
            for table, layout in ((policy, candidate.trainer), (sampler, candidate.sampler)):
                mesh = job.run.meshes[table.mesh]
                axes = table.axes or mesh.axes or {"dp": mesh.ranks}
                assert axes == layout.axes
                assert prod(axes.values()) == mesh.ranks
            assert job.run.engine == "processes" or (candidate.shared and candidate.trainer.ranks == 1)
            assert candidate.table(job.resolved, 0)["run"] is not job.resolved["run"]


def test_layouts_are_those_of_the_backends() -> None:
    assert {str(each.trainer) for each in space(3, "cpus")} == {"1", "1 rank of 2 cores", "1 rank of 3 cores"}
    megatron = {tuple(each.trainer.axes.items()) for each in space(4, "gpus", "policy.backend=megatron") if each.shared}
    assert (("dp", 1), ("pp", 2), ("cp", 2)) in megatron
    assert (("dp", 1), ("tp", 4)) in megatron
    fsdp = {tuple(each.trainer.axes.items()) for each in space(4, "gpus", "policy.backend=fsdp") if each.shared}
    assert fsdp == {(("dp", 4),), (("dp", 2), ("tp", 2)), (("dp", 1), ("tp", 4))}


def test_a_mesh_of_another_role_keeps_what_it_has() -> None:
    one = ["run.meshes={judge={gpus=1, ranks=2}}", "policy.backend=fsdp", "sampler.backend=vllm"]
    whole = ["reward={backend='fsdp', model='judge', mesh='judge'}", *one]
    for candidate in space(4, "gpus", *whole):
        job = load_job(QUICKSTART, [*whole, *candidate.overrides(0)])
        assert job.run.meshes["judge"].ranks == 2
        assert sum(mesh.ranks for mesh in job.run.meshes.values()) == 4
    with pytest.raises(ConfigError, match=r"judge take 2 of 2 gpus"):
        space(2, "gpus", *whole)


def test_budgets_are_halved_one_after_the_other() -> None:
    variants = space(2, "gpus", "policy.backend=fsdp", budgets=True)[0].variants
    assert variants[0] == {}
    assert [*variants[1:3]] == [{"sampler.slots": 256}, {"policy.micro_batch_tokens": 8192}]
