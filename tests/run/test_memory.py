import string
from pathlib import Path

import msgspec
import pytest

from meshrl import RunConfig
from meshrl.cli import main
from meshrl.config import validate
from meshrl.errors import ConfigError
from meshrl.roles import MemoryEstimate, MemoryTerm, ModelConfig, PolicyConfig, ReferenceConfig, Workload
from meshrl.run import MemoryOptions, MemoryPlan, MeshConfig, RolloutConfig, memory, plan_memory
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


def test_gpus_stand_for_the_ranks_of_the_only_mesh_and_leave_its_other_axes() -> None:
    run = RunConfig(meshes={"main": MeshConfig(ranks=4, axes={"dp": 2, "tp": 2})})
    (rank,) = plan_memory(config(), run, MemoryOptions(gpus=16)).meshes
    assert (rank.ranks, rank.axes, rank.has_gpu, rank.gib) == (16, {"dp": 8, "tp": 2}, True, 80)
    with pytest.raises(ConfigError, match=r"--gpus 7: the axes .* of the mesh 'main' need a multiple of 2"):
        plan_memory(config(), run, MemoryOptions(gpus=7))
    with pytest.raises(ConfigError, match=r"2 meshes \(apart, main\).* run.meshes.apart.ranks=N"):
        plan_memory(config(sampler={"mesh": "apart"}), ONE, MemoryOptions(gpus=8))


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
