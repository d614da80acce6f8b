"""What records tell of calls elsewhere: on other cores, along other axes, in a pipeline."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.events import Call, Event, Span, Step
from meshrl.planning.pace import CallCost, Pace
from meshrl.planning.records import Guesses, RecordedRun, fit, fit_ends

Mesh = Mapping[str, object]


def table(main: Mesh, **policy: object) -> dict[str, object]:
    return {
        "prompts": 4,
        "sampling": {"n": 2, "max_tokens": 10},
        "policy": {"micro_batch_tokens": 40, **policy},
        "run": {"meshes": {"main": dict(main)}},
    }


def record(main: Mesh, seconds: float, rows: int = 8) -> RecordedRun:
    pace = Pace({("Policy", "update"): [CallCost([seconds], rows)]}, [CallCost([seconds / 10])], strict=True)
    return RecordedRun(Path("recorded"), table(main), pace, seconds)


def seconds(records: list[RecordedRun], main: Mesh, cores: int | None = None) -> float:
    (work,) = fit(records, table(main), cores).pace.works["Policy", "update"]
    return work.seconds[0]


def test_two_records_with_different_cores_tell_what_cores_bring() -> None:
    records = [record({"cpus": 1}, 3.0), record({"cpus": 4}, 1.0)]  # 4 ** e = 3
    assert seconds(records, {"cpus": 1}) == 3.0
    assert seconds(records, {"cpus": 4}) == 1.0
    assert seconds(records, {"cpus": 2}) == pytest.approx(math.sqrt(3))
    assert fit(records, table({"cpus": 2})).guessed == []
    assert fit(records, table({"cpus": 4})).pace.own[0].seconds[0] == pytest.approx(0.1)


def test_one_record_leaves_what_cores_bring_to_a_guess_that_is_told() -> None:
    found = fit([record({"cpus": 2}, 1.0)], table({"cpus": 1}), guesses=Guesses(cores=1.0))
    assert found.pace.works["Policy", "update"][0].seconds == [2.0]
    assert found.guessed == ["Policy: cores ** 1, from ranks of 2 to ranks of 1"]
    assert seconds([record({}, 1.0)], {"cpus": 1}, cores=1) == 1.0  # it had all that the machine has
    assert seconds([record({}, 1.0)], {"cpus": 1}) == 1.0  # nobody knows what it had
    unknown = fit([record({}, 1.0)], table({"cpus": 1})).guessed
    assert unknown == ["Policy: recorded on ranks of unknown cores, taken as 1"]
    assert fit([replace(record({}, 1.0), cores={"main": 2})], table({"cpus": 1}), 8).guessed == [
        "Policy: cores ** 0.4, from ranks of 2 to ranks of 1"
    ]


def test_a_record_on_the_same_kind_of_device_comes_first() -> None:
    both = [record({"cpus": 2}, 1.0), record({"gpus": 1}, 0.1)]
    assert seconds(both, {"gpus": 1}) == 0.1
    assert fit(both, table({"gpus": 1})).guessed == []
    assert fit(both[:1], table({"gpus": 1})).guessed == ["Policy: a rank on a GPU as fast as the recorded one on a CPU"]


def test_calls_of_other_numbers_of_rows_are_compared_at_the_same() -> None:
    """A call takes 1 s and .1 s a row on one core, and half of both on four."""
    few, many = record({"cpus": 1}, 0.0), record({"cpus": 4}, 0.0)
    few = replace(few, pace=paced({rows: 1 + 0.1 * rows for rows in (8, 16)}))
    for sizes in ((40, 80), (40,)):
        other = replace(many, pace=paced({rows: (1 + 0.1 * rows) / 2 for rows in sizes}))
        (found, _) = fit([few, other], table({"cpus": 2})).pace.works["Policy", "update"]
        assert found.seconds[0] == pytest.approx(1.8 / math.sqrt(2))


def paced(seconds: Mapping[int, float]) -> Pace:
    return Pace({("Policy", "update"): [CallCost([each], rows) for rows, each in seconds.items()]}, strict=True)


def test_each_role_is_as_slow_and_as_fast_as_it_may_be() -> None:
    works = {("Policy", "update"): [CallCost([2.0], 8)], ("Sampler", "generate"): [CallCost([2.0], 8)]}
    run = RecordedRun(Path("recorded"), table({"cpus": 2}), Pace(works, strict=True), 4.0)
    apart = table({"cpus": 1}) | {"sampler": {"mesh": "rollout"}}
    apart["run"] = {"meshes": {"main": {"cpus": 1}, "rollout": {"cpus": 3}}}
    slow, fast = ({role: of[0].seconds[0] for (role, _), of in pace.works.items()} for pace in fit_ends([run], apart))
    assert slow == {"Policy": pytest.approx(2 * 2**0.8), "Sampler": 2.0}
    assert fast == {"Policy": 2.0, "Sampler": pytest.approx(2 * (2 / 3) ** 0.8)}


def test_ranks_that_share_rows_are_not_as_fast_as_all_of_them_and_a_pipeline_fills_and_drains() -> None:
    one = record({"gpus": 1}, 8.0)
    apart = {"gpus": 1, "ranks": 4, "axes": {"dp": 1, "tp": 4}}
    assert seconds([one], apart) == pytest.approx(8.0 / 4 / 0.9**2)
    assert fit([one], table(apart)).guessed == ["Policy: 4 ranks to the same rows, of each doubling 90%"]
    assert seconds([one, record(apart, 2.0)], apart) == 2.0
    stages = {"gpus": 1, "ranks": 2, "axes": {"dp": 1, "pp": 2}}
    assert seconds([one], stages) == pytest.approx(8.0 / 2 / 0.9 * (2 + 1) / 2)  # 80 tokens in passes of 40
    (ten,) = fit([one], table(stages, micro_batch_tokens=8)).pace.works["Policy", "update"]
    assert ten.seconds[0] == pytest.approx(8.0 / 2 / 0.9 * (10 + 1) / 10)


def test_ranks_that_share_rows_have_all_of_them() -> None:
    events: list[Event] = [Step(0, 0.0, 4.0), Step(1, 4.0, 8.0), Call(1, "FsdpPolicy", "update", 0.0, 1.0, 8)]
    spans = [Span(1, "main", rank, "FsdpPolicy", "update", 0.0, 1.0) for rank in range(4)]
    (work,) = Pace.recorded([*events, *spans], n=2, splits={"Policy": 2}).works["Policy", "update"]
    assert work.rows == 4
