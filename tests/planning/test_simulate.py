import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl.errors import ConfigError, DataError, RankFailed
from meshrl.events import Call, Event, Span, Step, Wait
from meshrl.planning import simulate_job
from meshrl.planning.forecast import Forecast
from meshrl.planning.pace import CallCost, Pace
from meshrl.planning.records import RecordedRun, fit
from meshrl.run import Job, load_job

CONFIG = """
algorithm = "grpo"
prompts = 4
steps = 24
task = {source = "words.jsonl", held_out = 0}
policy.model = "nowhere"
reward.function = "exact_match"
sampling.n = 2
run.meshes.rollout.cpus = 1
"""

MINE = """
from meshrl import AlgorithmConfig, CrossEntropy, Policy, PolicyConfig, Run, Sampler, SamplerConfig, Sampling
from meshrl import ClippedLoss, Task, TaskConfig, ValueLoss, publish, rollouts

class MineConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    sampling: Sampling
    prompts: int
    steps: int
    ahead: int = 1

async def mine(run: Run, config: MineConfig) -> None:
    policy, sampler = await run.spawn(Policy, config.policy), await run.spawn(Sampler, config.sampler)
    prompts = Task.load(config.task).batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, swap="abort") as stream:
        async for _ in run.steps(config.steps):
            metrics = await policy.update(await anext(stream), CrossEntropy())
            await publish(policy, stream)
            await run.record(metrics)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}>", "answer": str(number)} for number in range(40)]
    Path("words.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    Path("grpo.toml").write_text(CONFIG, "utf-8")
    return tmp_path / "grpo.toml"


def job(source: Path, *overrides: str) -> Job:
    return load_job(source, overrides)


def forecast(source: Path, *overrides: str, rollout: float = 2.0, train: float = 1.0, seed: int = 0) -> Forecast:
    with capture_logs():
        return simulate_job(job(source, *overrides), rollout=rollout, train=train, seed=seed)


def predict(source: Path, recorded: Path, *overrides: str, folder: Path | None = None, seed: int = 0) -> Forecast:
    with capture_logs():
        return simulate_job(job(source, *overrides), record=recorded, folder=folder, seed=seed)


def record(folder: Path, events: Sequence[Event]) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    (folder / "config.toml").write_text("ahead = 0\nsampling.n = 2\n", "utf-8")
    return folder


def synchronous(steps: int) -> list[Event]:
    """Steps of 4 s: 2 s of generation, 0.25 s until the script has it, 0.5 s of rewards, 1 s of training, 0.25 s."""
    events: list[Event] = []
    for step in range(steps):
        t = 4.0 * step
        parts = [
            ("FunctionReward", "score", 2.0, 2.5, 8),
            ("TorchSampler", "generate", 0.0, 2.0, 4),
            ("TorchPolicy", "update", 2.75, 3.75, 8),
            ("TorchPolicy", "weights", 3.75, 3.75, None),
            ("TorchSampler", "load", 3.75, 3.75, None),
        ]
        for number, (actor, endpoint, began, ended, count) in enumerate(parts, start=10 * step):
            events.append(Call(number, actor, endpoint, t + began, t + ended, count))
            events.append(Span(number, "main", 0, actor, endpoint, t + began, t + ended))
        events.append(Wait("trainer", "a batch", "0 of 4 groups are ready", t, t + 2.75))
        events.append(Step(step, t, t + 4))
    return events


def test_on_one_mesh_a_step_takes_rollout_and_training_one_after_the_other(source: Path) -> None:
    found = forecast(source)
    assert (found.step_seconds, found.step_seconds_median) == pytest.approx((3.0, 3.0))
    assert found.steps_per_hour == pytest.approx(1200)
    assert found.efficiency == pytest.approx(2 / 3)
    assert (found.bound, found.staleness, found.measured) == ({"rollout": 1.0}, [24 * 8], None)
    ahead = forecast(source, "ahead=1")  # by which nothing is gained there
    assert ahead.step_seconds == pytest.approx(3.0, rel=0.02)
    assert ahead.efficiency == pytest.approx(2 / 3, abs=0.03)
    two = forecast(source, "sampler.mesh=rollout", "run.meshes.rollout.ranks=2")  # guesses are of one rank
    assert two.step_seconds == pytest.approx(2.0)
    judged = ["reward={backend = 'fsdp', model = 'nowhere', mesh = 'judge'}"]  # its model is not needed
    held = forecast(source, *judged)
    assert held.step_seconds == pytest.approx(3.0)
    assert {lane.mesh for lane in held.idle} == {"main", "judge"}


def test_one_step_ahead_on_two_meshes_a_step_takes_the_longer_of_both(source: Path) -> None:
    for rollout, train in ((2.0, 1.0), (1.0, 2.0), (1.5, 1.5)):
        found = forecast(source, "ahead=1", "sampler.mesh=rollout", rollout=rollout, train=train)
        assert found.step_seconds == pytest.approx(max(rollout, train), rel=0.02)
        assert found.efficiency == pytest.approx(1, abs=0.03)
        assert sum(found.staleness) == 24 * 8
        assert len(found.staleness) == 2
        sampler = next(lane for lane in found.idle if lane.mesh == "rollout")
        assert sampler.busy == pytest.approx(rollout, rel=0.1)


def test_an_evaluation_takes_no_step_longer_where_the_sampler_has_room_for_it(source: Path) -> None:
    apart = ["ahead=1", "sampler.mesh=rollout", "task.held_out=4", "task.held_out_fraction=0.5"]
    every = ["evaluation.every=6", "evaluation.n=3"]  # 16 rows, that take 2 s alone, beside steps that leave 1 s idle
    alone, beside = (forecast(source, *apart, *more, rollout=1.0, train=2.0) for more in ([], every))
    assert alone.step_seconds == pytest.approx(2.0, rel=0.01)
    assert beside.step_seconds == pytest.approx(2.0, rel=0.01)
    busy = [next(lane.busy for lane in found.idle if lane.mesh == "rollout") for found in (alone, beside)]
    assert busy[1] * 24 == pytest.approx(busy[0] * 24 + 4 * 2.0, rel=0.01)  # the fifth comes after the steps
    waiting = forecast(source, *apart, *every, "evaluation.pause_training=true", rollout=1.0, train=2.0)
    assert waiting.step_seconds > 2.2


def scripted(source: Path, script: str) -> Path:
    source.with_name("mine.py").write_text(script, "utf-8")
    text = CONFIG.replace('"grpo"', '"mine.py"').replace('reward.function = "exact_match"', "")
    source.write_text(text, "utf-8")
    return source


def test_an_aborted_rollout_goes_on_where_it_was(source: Path) -> None:
    found = forecast(scripted(source, MINE), "sampler.mesh=rollout", rollout=2.0, train=1.5)
    assert found.step_seconds == pytest.approx(2.0, rel=0.02)
    assert sum(found.staleness) == 24 * 8


def test_an_update_refuses_what_real_ones_refuse(source: Path) -> None:
    for loss, said in (
        ('ClippedLoss(anchor="trainer")', "`logprobs`, which the batch does not have: call `batch = await policy"),
        ("ValueLoss()", "ValueLoss"),
    ):
        with pytest.raises(RankFailed, match=said):
            forecast(scripted(source, MINE.replace("CrossEntropy()", loss)))


def test_a_recorded_run_is_predicted_from_its_events(source: Path, tmp_path: Path) -> None:
    run = record(tmp_path / "recorded", synchronous(9))
    found = predict(source, run)
    apart = predict(source, run, "ahead=2", "sampler.mesh=rollout")
    twice = predict(source, run, "prompts=8", folder=tmp_path / "twice")
    (kept,) = (tmp_path / "twice").rglob("config.toml")
    again = predict(source, kept.parent, "prompts=8")
    assert found.measured == pytest.approx(4.0)
    assert found.ratio == pytest.approx(1.0)
    assert dict(twice.lines())[f"measured in {run}"].startswith("4.00 s, this setting / recorded setting")
    assert "predicted / measured" in dict(again.lines())[f"measured in {kept.parent}"]
    assert found.step_seconds == pytest.approx(4.0)
    assert apart.step_seconds == pytest.approx(2.0, rel=0.02)
    assert twice.step_seconds == pytest.approx(2 * 3.5 + 0.5)


def test_the_same_seed_predicts_the_same(source: Path, tmp_path: Path) -> None:
    uneven = [
        msgspec.structs.replace(each, ended=each.ended - 0.01 * (each.call % 7)) if isinstance(each, Span) else each
        for each in synchronous(9)
    ]
    run = record(tmp_path / "recorded", uneven)
    one, same, other = (predict(source, run, seed=seed) for seed in (1, 1, 2))
    assert msgspec.structs.replace(one, simulated_in=0.0) == msgspec.structs.replace(same, simulated_in=0.0)
    assert one.step_seconds != other.step_seconds


def test_what_is_missing_is_told(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rollout SECONDS"):
        simulate_job(job(source))
    short, empty = record(tmp_path / "short", synchronous(2)), record(tmp_path / "empty", [])
    for run, told in ((short, "the run has 2 steps, and its first 2"), (empty, "nothing to simulate from")):
        with pytest.raises(DataError, match=told):
            predict(source, run)
    (short / "config.toml").unlink()
    with pytest.raises(DataError, match=r"there is no config\.toml"):
        predict(source, short)
    run = record(tmp_path / "recorded", synchronous(9))
    with pytest.raises(RankFailed, match=r"no call of Reference\.logprobs; it has calls of Policy"):
        predict(source, run, "loss.kl=0.1")


Mesh = Mapping[str, object]


def table(main: Mesh, **policy: object) -> dict[str, object]:
    return {
        "prompts": 4,
        "sampling": {"n": 2, "max_tokens": 10},
        "policy": {"micro_batch_tokens": 40, **policy},
        "run": {"meshes": {"main": dict(main)}},
    }


def recorded(main: Mesh, seconds: float, rows: int = 8) -> RecordedRun:
    pace = Pace({("Policy", "update"): [CallCost([seconds], rows)]}, [CallCost([seconds / 10])], strict=True)
    return RecordedRun(Path("recorded"), table(main), pace, seconds)


def seconds(records: list[RecordedRun], main: Mesh, cores: int | None = None) -> float:
    (work,) = fit(records, table(main), cores).works["Policy", "update"]
    return work.seconds[0]


def test_two_records_with_different_cores_tell_what_cores_bring() -> None:
    records = [recorded({"cpus": 1}, 3.0), recorded({"cpus": 4}, 1.0)]  # 4 ** e = 3
    assert seconds(records, {"cpus": 1}) == 3.0
    assert seconds(records, {"cpus": 4}) == 1.0
    assert seconds(records, {"cpus": 2}) == pytest.approx(math.sqrt(3))
    assert fit(records, table({"cpus": 2})).guessed == []
    assert fit(records, table({"cpus": 4})).own[0].seconds[0] == pytest.approx(0.1)


def test_a_record_on_the_same_kind_of_device_comes_first() -> None:
    both = [recorded({"cpus": 2}, 1.0), recorded({"gpus": 1}, 0.1)]
    assert seconds(both, {"gpus": 1}) == 0.1
    assert fit(both, table({"gpus": 1})).guessed == []
    assert fit(both[:1], table({"gpus": 1})).guessed == ["Policy: a rank on a GPU as fast as the recorded one on a CPU"]


def test_ranks_that_share_rows_are_not_as_fast_as_all_of_them_and_a_pipeline_fills_and_drains() -> None:
    one = recorded({"gpus": 1}, 8.0)
    apart = {"gpus": 1, "ranks": 4, "axes": {"dp": 1, "tp": 4}}
    assert seconds([one], apart) == pytest.approx(8.0 / 4 / 0.9**2)
    assert fit([one], table(apart)).guessed == ["Policy: 4 ranks to the same rows, of each doubling 90%"]
    assert seconds([one, recorded(apart, 2.0)], apart) == 2.0
    stages = {"gpus": 1, "ranks": 2, "axes": {"dp": 1, "pp": 2}}
    assert seconds([one], stages) == pytest.approx(8.0 / 2 / 0.9 * (2 + 1) / 2)  # 80 tokens in passes of 40
    (ten,) = fit([one], table(stages, micro_batch_tokens=8)).works["Policy", "update"]
    assert ten.seconds[0] == pytest.approx(8.0 / 2 / 0.9 * (10 + 1) / 10)
