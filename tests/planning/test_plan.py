import random
import shlex
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from meshrl.errors import ConfigError, DataError
from meshrl.events import Call, Event, Gauge, Span, Step
from meshrl.planning import Devices, Plan, PlanOptions, RecordedRun, make_plan
from meshrl.planning.plan import Planner, search
from meshrl.planning.space import Candidate, Space
from meshrl.roles import MemoryEstimate, MemoryTerm, ModelConfig, Workload
from meshrl.run import find_config, load_job
from meshrl.run.recorder import Recorder
from tests.first_hour.terminal import type_in

GIB = 2**30
ROWS = 12
"""Of a step: 6 prompts, 2 completions each."""
CONFIG: Mapping[str, object] = {
    "algorithm": "grpo",
    "prompts": 6,
    "steps": 24,
    "task": {"source": "words.jsonl", "held_out": 4, "held_out_fraction": 0.5},
    "policy": {"model": "nowhere"},
    "reward": {"function": "exact_match"},
    "sampling": {"n": 2},
    "evaluation": {"every": 5},
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}>", "answer": str(number)} for number in range(40)]
    Path("words.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    Path("grpo.toml").write_text(tomli_w.dumps(CONFIG), "utf-8")
    return "grpo.toml"


def record(
    source: str, name: str, draw: float, train: float, *, cpus: int | None = 1, steps: Sequence[float] = (1.0,) * 9
) -> Path:
    folder = Path(name)
    job = load_job(Path(source), [f"run.meshes.main.cpus={cpus}"] if cpus else [])
    Recorder(folder, job.resolved).close(None)
    events, t = list[Event](), 0.0
    for step, longer in enumerate(steps):
        began = t
        parts = [
            ("TorchSampler", "generate", draw * longer, ROWS // 2),
            ("FunctionReward", "score", 0.0, ROWS),
            ("TorchPolicy", "update", train * longer, ROWS),
            ("TorchPolicy", "weights", 0.0, None),
            ("TorchSampler", "load", 0.0, None),
        ]
        for number, (actor, endpoint, seconds, rows) in enumerate(parts, start=10 * step):
            events.append(Call(number, actor, endpoint, t, t + seconds, rows))
            events.append(Span(number, "main", 0, actor, endpoint, t, t + seconds))
            t += seconds
        events.append(Step(step, began, t))
    (folder / "events.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    return folder


def test_of_a_planted_run_the_split_is_found_that_is_best_by_hand(source: str) -> None:
    run = record(source, "recorded", draw=2.0, train=1.0)
    assert RecordedRun.read(run).measured == pytest.approx(3.0)
    made = make_plan(source, [], PlanOptions(Devices(3, "cpus"), [run], price=9.0, aheads=(0, 1), best=1))
    best = made.proposals[0]
    assert best.name == "train 1, sample 2 (dp 2), ahead 1"  # 2 s over 2 replicas, beside 1 s
    assert best.step_seconds == pytest.approx(1.0, rel=0.02)
    assert best.steps_per_minute == pytest.approx(60, rel=0.02)
    assert best.efficiency > 0.95
    assert best.staleness == pytest.approx(1, abs=0.05)
    assert best.cost == pytest.approx(9.0 * 3 / 3600, rel=0.02)
    assert best.guessed == ["Sampler.generate: 6 rows on a rank, from 12"]
    assert best.low == pytest.approx(best.steps_per_minute / 2**0.5, rel=0.02)  # all of a step is drawing fewer rows
    assert best.low <= best.steps_per_minute <= best.high
    assert made.records == {"recorded": pytest.approx(1.0)}
    job = load_job(Path(source), best.overrides)
    assert job.run.engine == "processes"
    assert {name: mesh.ranks for name, mesh in job.run.meshes.items()} == {"main": 1, "rollout": 2, "reward": 1}
    assert f"meshrl run {source} {shlex.join(best.overrides)}" == made.command(best)


def test_where_rollouts_may_not_be_ahead_ranks_are_shared(source: str) -> None:
    runs = [record(source, "two", draw=1.0, train=1.0, cpus=2), record(source, "one", draw=1.9, train=1.9)]
    made = make_plan(source, ["ahead=0"], PlanOptions(Devices(2, "cpus"), runs))
    assert made.proposals[0].name == "one mesh: 1 rank of 2 cores, ahead 0"
    assert made.proposals[0].step_seconds == pytest.approx(2.0)
    assert [proposal.step_seconds for proposal in made.proposals[1:]] == [pytest.approx(3.8)]


def test_a_record_of_uneven_steps_predicts_its_own(source: str) -> None:
    """A third of the steps take four times as long, in a row: fewer simulated ones would miss them or see no other."""
    run = record(source, "uneven", draw=3.0, train=1.0, steps=[1.0] * 30 + [4.0] * 30 + [1.0] * 30)
    made = make_plan(source, ["ahead=0"], PlanOptions(Devices(1, "cpus"), [run]))
    assert made.records == {"uneven": pytest.approx(1.0, rel=0.05)}


def test_what_no_record_tells_is_marked_and_given_room(source: str) -> None:
    run = record(source, "two", draw=1.0, train=1.0, cpus=2)
    apart, together = make_plan(source, [], PlanOptions(Devices(2, "cpus"), [run], aheads=(1,), best=2)).proposals
    assert together.guessed == []
    assert together.high == pytest.approx(together.low)
    assert [told.partition(":")[0] for told in apart.guessed] == ["Policy", "Sampler"]
    assert apart.low < 0.8 * apart.high


def test_a_record_tells_the_cores_that_its_configuration_leaves_open(source: str) -> None:
    run = record(source, "recorded", draw=1.0, train=1.0, cpus=None)
    events = run / "events.jsonl"
    events.write_bytes(msgspec.json.encode(Gauge("cores of main", 0.0, 1)) + b"\n" + events.read_bytes())
    proposals = make_plan(source, ["ahead=0"], PlanOptions(Devices(2, "cpus"), [run])).proposals
    (whole,) = (each for each in proposals if each.name == "one mesh: 1 rank of 2 cores, ahead 0")
    assert whole.step_seconds == pytest.approx(2.0 * (1 / 2) ** 0.4)
    assert "Policy: cores ** 0.4, from ranks of 1 to ranks of 2" in whole.guessed


def test_no_simulated_step_is_shorter_than_its_lower_bound(source: str, tmp_path: Path) -> None:
    numbers = random.Random(1)
    run = record(source, "noisy", 3.2, 1.7, cpus=2, steps=[1 + numbers.random() for _ in range(9)])
    planner = Planner(source, [], PlanOptions(Devices(3, "cpus"), [run], aheads=(0, 4)), tmp_path)
    assert len(planner.candidates) > 6
    for candidate in planner.candidates:
        assert planner.bound(candidate) <= planner.seconds(candidate) * (1 + 1e-9), candidate.name


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_pruning_drops_none_of_the_best(candidates: Sequence[tuple[int, int, bool]], keep: int) -> None:
    numbered = list(enumerate(candidates))  # a bound, how much longer the steps are, and whether it fits
    found = search(
        numbered,
        lambda each: each[1][0],
        lambda each: each if each[1][2] else None,
        lambda each: each[1][0] + each[1][1],
        keep,
    )
    every = sorted((bound + more, number) for number, (bound, more, fits) in numbered if fits)
    assert [each.seconds for each in found.best] == [seconds for seconds, _ in every[:keep]]
    assert found.simulated + found.pruned + found.refused == len(candidates)


def of_memory(gib: float) -> object:
    """Roles that hold as much, divided by tp, and refuse four ranks along it; slots take a tenth of it each 512."""

    def memory_of(config: ModelConfig, work: Workload) -> MemoryEstimate:
        tp = work.axes.get("tp", 1)
        if tp == 4:
            raise ConfigError("3 heads cannot be divided by tp = 4")
        budget = getattr(config, "slots", 0) / 512
        return MemoryEstimate([MemoryTerm("parameters", int(gib * (1 + budget / 10) * GIB / tp), "", "")])

    return memory_of


GPUS = ["policy.backend=fsdp", "sampler.backend=vllm"]


def test_only_layouts_that_fit_are_kept_with_the_largest_budget(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.run.memory.memory_of", of_memory(80.0))
    made = make_plan(
        source, GPUS, PlanOptions(Devices(4, "gpus"), rollout=8, train=8, memory=42.1, aheads=(1,), best=2)
    )
    assert made.proposals
    assert made.refused > 0
    assert made.candidates == made.simulated + made.pruned + made.refused
    for each in made.proposals:
        assert each.needed_gib is not None
        assert each.needed_gib == pytest.approx(42)
        assert "sampler.slots=128" in each.overrides  # twice as many would take a GiB more
        assert "tp 4" not in each.name
    told = r"nothing fits into memory: 11\.5 GiB more of each GPU are missing for .*tp = 2"
    with pytest.raises(ConfigError, match=told):
        make_plan(source, GPUS, PlanOptions(Devices(4, "gpus"), rollout=8, train=8, memory=30.0, aheads=(1,)))


def test_what_is_missing_or_cannot_be_is_told(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    two = Devices(2, "cpus")
    known = PlanOptions(two, rollout=1, train=1)
    wrong: list[tuple[str, list[str], PlanOptions, type[Exception], str]] = [
        (source, [], PlanOptions(two), ConfigError, "--rollout SECONDS"),
        (source, [], PlanOptions(two, rollout=0, train=0), ConfigError, "--rollout and --train are both 0"),
        (source, [], PlanOptions(two, rollout=-1, train=1), ConfigError, "--rollout is -1 s"),
        (source, [], PlanOptions(two, rollout=1, train=1, memory=-4), ConfigError, "--memory is -4 GiB"),
        (source, ["run.meshes.main.cpus=1"], known, ConfigError, "the plan chooses this key"),
        ("reward_model/quickstart", [], known, ConfigError, "the algorithm has no policy"),
        (source, [], PlanOptions(two, [tmp_path / "empty"]), DataError, "nothing to simulate from"),
    ]
    for name, overrides, wanted, error, told in wrong:
        with pytest.raises(error, match=told):
            make_plan(name, overrides, wanted)


def test_the_command_prints_the_best_and_what_to_paste_or_asks_what_is_to_be_divided(source: str) -> None:
    record(source, "recorded", draw=1.0, train=1.0)
    options = ("--cpus", "2", "--from", "recorded", "--price", "1", "--json", "plan.json", "ahead=1")
    found = type_in("plan", source, *options)
    assert found.status == 0
    made = msgspec.json.decode(Path("plan.json").read_bytes(), type=Plan)
    assert f"1: train 1, sample 1, ahead 1\n   {made.command(made.proposals[0])}" in found.out
    assert "recorded: the prediction for its own steps is 1.00 times the measured time" in found.out
    assert f"{made.candidates} candidates on 2 cpus" in found.out
    assert made.candidates == made.simulated + made.pruned + made.refused
    asked = type_in("plan", source)
    assert (asked.status != 0, "--gpus N" in asked.err) == (True, True)


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


def test_each_candidate_is_valid_and_takes_all_devices() -> None:
    for count, kind, settings in GIVEN:
        candidates = space(count, kind, *settings)
        assert len({candidate.name for candidate in candidates}) == len(candidates)
        for candidate in candidates:
            job = load_job(QUICKSTART, [*settings, *candidate.overrides])
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
            assert candidate.table(job.resolved)["run"] is not job.resolved["run"]


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
        job = load_job(QUICKSTART, [*whole, *candidate.overrides])
        assert job.run.meshes["judge"].ranks == 2
        assert sum(mesh.ranks for mesh in job.run.meshes.values()) == 4
    with pytest.raises(ConfigError, match=r"judge take 2 of 2 gpus"):
        space(2, "gpus", *whole)
