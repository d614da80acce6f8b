import string
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from meshrl import RunConfig
from meshrl.cli import main
from meshrl.config import validate
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import MemoryEstimate, MemoryTerm, ModelConfig, PolicyConfig, ReferenceConfig, Workload
from meshrl.run import MemoryOptions, MemoryPlan, MeshConfig, RolloutConfig, memory, plan_memory, savings_of
from meshrl.run.check import examine

GIB = 2**30
SIZES = {"hidden_size": 8, "ffn_size": 8, "layers": 1, "heads": 2, "max_tokens": 64}
NEW = {"characters": f"{string.ascii_letters}>", **SIZES}
UNTOLD = {"reference": {"micro_batch_tokens": 1}}
ONE = RunConfig(engine="processes", meshes={"main": MeshConfig(ranks=4, gpus=1, gib=10)})


def told(config: ModelConfig, work: Workload) -> MemoryEstimate | None:
    """Of a policy 8 GiB over the ranks, and 2 in an update; of a sampler 1 and 1; of a reference nothing, or 0."""
    if isinstance(config, ReferenceConfig):
        return None if config.micro_batch_tokens == 1 else MemoryEstimate([])
    if config.role == "Sampler":
        return MemoryEstimate([MemoryTerm("weights", GIB, "", ""), MemoryTerm("logits", GIB, "generate", "")])
    assert isinstance(config, PolicyConfig)
    terms = [
        MemoryTerm("parameters", 8 * GIB // work.axes.get("dp", 1), "", ""),
        MemoryTerm("moments", GIB, "", "", host=True),
        MemoryTerm("activations", config.micro_batch_tokens * 2**17, "update", ""),
    ]
    return MemoryEstimate(terms, ["micro_batch_tokens=8192", "micro_batch_tokens=none"])


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", told)


def config(**changes: object) -> RolloutConfig:
    task = {"source": "meshrl:spell_backward", "prompt": "{word}>"}
    good = {"task": task, "policy": {"model": NEW}, "sampler": {}, "reward": {}, "reference": {}}
    return validate(RolloutConfig, {**good, **changes}, "test")


def test_a_rank_holds_what_is_always_there_and_the_call_that_takes_most() -> None:
    (rank,) = plan_memory(config(), ONE).meshes
    assert rank.peak(host=False) == ((1 + 2 + 1 + 2) * GIB, "policy.update")  # beside 1 GiB of CUDA's own
    assert rank.peak(host=True) == (GIB, "")
    (late,) = plan_memory(config(ahead=1), ONE).meshes
    assert late.peak(host=False) == ((1 + 2 + 1 + 2 + 1) * GIB, "policy.update")  # rows are drawn meanwhile


def test_a_role_of_unknown_need_is_lacking_in_the_sum_and_leaves_no_headroom() -> None:
    (whole,) = plan_memory(config(), ONE).meshes
    assert (whole.unknown, whole.headroom) == ([], 4 * GIB)
    (rank,) = plan_memory(config(**UNTOLD), ONE).meshes
    (unknown,) = [held for held in rank.roles if held.memory is None]
    assert "'torch' does not report it" in unknown.unknown
    assert (rank.unknown, rank.needed, rank.headroom) == (["reference"], 6 * GIB, None)
    (full,) = plan_memory(config(**UNTOLD), ONE, MemoryOptions(gib=5)).meshes
    assert full.headroom == -GIB  # what is known does not fit, whatever the other takes


def test_gpus_stand_for_the_ranks_of_the_only_mesh_and_leave_its_other_axes() -> None:
    run = RunConfig(meshes={"main": MeshConfig(ranks=4, axes={"dp": 2, "tp": 2})})
    (rank,) = plan_memory(config(), run, MemoryOptions(gpus=16)).meshes
    assert (rank.ranks, rank.axes, rank.has_gpu, rank.gib) == (16, {"dp": 8, "tp": 2}, True, 80)
    with pytest.raises(ConfigError, match=r"--gpus 7: the axes .* of the mesh 'main' need a multiple of 2"):
        plan_memory(config(), run, MemoryOptions(gpus=7))
    with pytest.raises(ConfigError, match=r"2 meshes \(apart, main\).* run.meshes.apart.ranks=N"):
        plan_memory(config(sampler={"mesh": "apart"}), ONE, MemoryOptions(gpus=8))


def test_what_a_setting_would_save_is_what_the_plan_with_it_says() -> None:
    plan = plan_memory(config(), ONE)

    def planned(settings: Sequence[str], asked: MemoryOptions) -> MemoryPlan:
        if "policy.micro_batch_tokens=8192" in settings:
            return plan_memory(config(policy={"model": NEW, "micro_batch_tokens": 8192}), ONE, asked)
        if "run.meshes.main.ranks=8" in settings:
            return plan_memory(config(), RunConfig(meshes={"main": MeshConfig(ranks=8, gpus=1, gib=10)}), asked)
        if "run.meshes.main.axes.dp=2" in settings:  # what is not told takes nothing in the sum
            return plan_memory(config(**UNTOLD, policy={"model": NEW, "micro_batch_tokens": 1}), ONE, asked)
        raise ModelError(f"{settings} is refused")

    found = savings_of(plan, MemoryOptions(), planned)
    assert [(each.setting, each.nbytes) for each in found] == [
        ("policy.micro_batch_tokens=8192", GIB),
        ("run.meshes.main.ranks=8", GIB),
    ]


def test_check_doubts_a_mesh_whose_roles_do_not_fit_or_nearly_fill_it() -> None:
    pytest.importorskip("transformers", reason="else `check` has only to say that the backend is not whole")

    def doubts(gib: float | None, **changes: object) -> list[str]:
        run = RunConfig(engine="processes", meshes={"main": MeshConfig(ranks=4, gpus=1, gib=gib)})
        return [doubt for doubt in examine(config(**changes), run).doubts if "run.meshes" in doubt]

    assert doubts(10) == doubts(None) == []
    (full,) = doubts(5)
    assert "a rank needs about 6.0 GiB in policy.update, and has gib = 5" in full
    (tight,) = doubts(6.1)
    assert "leaves less than a twentieth of gib = 6.1" in tight
    (guessed,) = doubts(None, policy={"model": NEW, "micro_batch_tokens": 2**20})
    assert "a rank needs about 132.0 GiB in policy.update, and is taken to have 80, because no gib is set" in guessed
    assert doubts(None, **UNTOLD) == []
    (unknown,) = doubts(10, **UNTOLD)
    assert "a rank needs about 6.0 GiB in policy.update, without that of reference, which is unknown" in unknown
    assert "'torch' does not report it" in unknown


def test_the_command_prints_the_table_and_writes_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "memory.json"
    new = "policy.model={characters='abc>',hidden_size=8,ffn_size=8,layers=1,heads=2,max_tokens=64}"
    command = ["memory", "grpo/quickstart", new, "--gpus", "4", "--gib"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "5", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "main: 6.00 of 5 GiB: it does not fit: 1.00 GiB more are needed" in printed
    assert "policy.micro_batch_tokens=8192 would save 1.00 GiB on each rank of main" in printed
    plan = msgspec.json.decode(file.read_bytes(), type=MemoryPlan)
    assert [saving.setting for saving in plan.savings] == ["policy.micro_batch_tokens=8192", "--gpus 8"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "50", "loss.kl=0.1", "reference.micro_batch_tokens=1"])
    printed = capsys.readouterr().out
    assert "main: 6.00 of 50 GiB without reference: it may not fit, because the memory of reference is" in printed
    assert "are free" not in printed
