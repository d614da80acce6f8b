import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.errors import ConfigError
from meshrl.events import Call, Delivery, Event, Gauge, Span, Step, Swap, Wait
from meshrl.observe import Record, find_run, idleness, make_trace, overlap, read_run, render
from meshrl.observe.analysis import run_lines, time_lines
from meshrl.observe.page import make_content
from tests.first_hour.terminal import type_in

SUMMARY = b'{"status": "finished", "steps": 2, "wall_s": 9.5, "first_reward": 0.25, "last_reward": 0.75}'
METRICS = b'{"step":0,"seconds":4.0,"reward":0.25,"loss":0.5}\n{"step":1,"seconds":9.0,"reward":0.75,"loss":null}\n'
SAMPLES = b'{"step":0,"prompt":"a</script><b>&","completion":"b","answer":"b","reward":1.0}\n'


def span(mesh: str, endpoint: str, began: float, ended: float, rank: int = 0, call: int = 0) -> Span:
    actor = "Sampler" if endpoint in ("generate", "load") else "Policy"
    return Span(call, mesh, rank, actor, endpoint, began, ended)


def synchronous(rollout: float, training: float, swap: float, steps: int = 3) -> list[Event]:
    events: list[Event] = []
    now = 1.0
    for step in range(steps):
        began = now
        for endpoint, length in (("generate", rollout), ("update", training), ("load", swap)):
            events.append(span("main", endpoint, now, now + length))
            now += length
        events.append(Step(step, began, now))
    return events


def a_run() -> list[Event]:
    """Two steps: the trainer waits for the first batch, then both sides run at once, and the sampler waits."""
    return [
        Call(1, "Sampler", "generate", 1, 4, rows=8, tokens=80),
        Span(1, "rollout", 0, "Sampler", "generate", 1, 4),
        Wait("trainer", "a batch", "1 of 4 groups are ready", 1, 3),
        Wait("trainer", "a batch", "3 of 4 groups are ready", 3, 4),
        Delivery(0, 4, 8, [8], {"stale": 1}),
        Call(2, "Policy", "update", 4, 6, rows=8, tokens=80),
        Span(2, "main", 0, "Policy", "update", 4, 6),
        Span(2, "main", 1, "Policy", "update", 4, 5.5),
        Call(3, "Sampler", "generate", 4, 5, rows=8),
        Span(3, "rollout", 0, "Sampler", "generate", 4, 5),
        Wait("rollout", "capacity", "capacity waits for version 1", 5, 6),
        Span(4, "rollout", 0, "Sampler", "load", 6, 6.5),
        Swap(1, 6, 6.1, 6.5, 1000),
        Step(0, 1, 6.5),
        Gauge("groups ready", 4, 4),
        Gauge("groups ready", 4.5, 0),
        Delivery(1, 6.5, 8, [6, 2]),
        Span(5, "main", 0, "Policy", "update", 6.5, 9),
        Span(5, "main", 1, "Policy", "update", 6.5, 9),
        Step(1, 6.5, 9.5),
    ]


def write(folder: Path, events: Sequence[Event]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    (folder / "metrics.jsonl").write_bytes(METRICS)
    (folder / "samples.jsonl").write_bytes(SAMPLES)
    (folder / "summary.json").write_bytes(SUMMARY)
    (folder / "config.toml").write_text('algorithm = "grpo"\nahead = 1\n', "utf-8")
    return folder


def data_of(page: str) -> dict[str, object]:
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script', page, re.DOTALL)
    return msgspec.json.decode(text, type=dict[str, object])


def test_a_synchronous_run_overlaps_nothing_and_perfect_overlap_is_one() -> None:
    for rollout, training in ((3, 2), (2, 5)):
        found = overlap(synchronous(rollout, training, swap=1))
        assert found.efficiency == pytest.approx(max(rollout, training) / (rollout + training + 1))
        for step in found.steps:
            shares = (step.rollout_alone, step.training_alone, step.sync, step.both, step.other)
            assert shares == pytest.approx((rollout, training, 1, 0, 0))
            assert step.bound == ("rollout" if rollout > training else "training")
    events: list[Event] = [Step(step, step, step + 1) for step in range(4)]
    events += [span("main", "update", step, step + 1) for step in range(4)]
    events += [span("rollout", "generate", 0.5 * half, 0.5 * half + 0.4) for half in range(8)]
    found = overlap(events)
    assert found.efficiency == 1
    assert (found.total.rollout, found.total.both) == pytest.approx((3.2, 3.2))


def test_what_bounded_each_step_and_a_run_without_steps_or_ranks() -> None:
    first, second = overlap(a_run()).steps
    assert (first.rollout, first.training, first.both) == (4, 2, 1)
    assert (first.rollout_alone, first.training_alone, first.sync, first.other) == (3, 1, 0.5, 0)
    assert (second.training_alone, second.other) == (2.5, 0.5)
    assert (first.bound, second.bound) == ("rollout", "training")
    without_the_first = overlap(a_run(), first=1)
    assert without_the_first.numbers == [1]
    assert without_the_first.efficiency == pytest.approx(2.5 / 3)
    found = overlap([Call(1, "Sampler", "generate", 1, 3), Call(2, "Policy", "update", 3, 4)])
    assert (found.numbers, found.total.rollout, found.total.seconds) == ([0], 2, 3)
    assert overlap([]).efficiency == 1


def test_what_the_trainer_waits_for_tells_rollouts_from_weights_on_their_way_and_the_scripts_work() -> None:
    events: list[Event] = [span("rollout", "generate", 0, 4), span("rollout", "load", 1, 3), Step(0, 0, 4)]
    assert overlap(events).total.sync == 2
    waiting = overlap([*events, Wait("trainer", "a batch", "", 0, 4)]).total
    assert (waiting.sync, waiting.rollout_alone) == (0, 4)

    events = [span("rollout", "generate", 0, 9), span("main", "update", 4, 8), Step(0, 0, 10)]
    alone = overlap(events).total
    assert (alone.rollout_alone, alone.both, alone.other) == (5, 4, 1)
    events += [Wait("trainer", "a batch", "", 0, 3), Delivery(0, 3, 8, [8])]
    streamed = overlap(events).total
    assert (streamed.rollout_alone, streamed.both, streamed.other) == (3, 4, 3)
    policy, _ = idleness(events)
    assert [(reason.why.split()[0], reason.seconds) for reason in policy.reasons] == [("trainer", 3), ("between", 3)]


def test_why_each_rank_was_idle_also_one_that_generates_and_trains() -> None:
    policy, other, sampler = idleness(a_run())
    told = [[(reason.why, reason.seconds) for reason in each.reasons] for each in (policy, other, sampler)]
    own = "between calls: the script's own work"
    on_their_way = "new weights are on their way to a sampler"
    assert told[0] == [("trainer waits for a batch", 3), (on_their_way, 0.5), (own, 0.5)]
    assert policy.reasons[0].blocked == "1 of 4 groups are ready"
    assert (policy.busy, policy.idle) == (4.5, 4)
    assert ("other ranks of main still run Policy.update", 0.5) in told[1]
    assert told[2] == [("Policy.update runs on main", 2.5), ("rollout waits for capacity", 1), (own, 0.5)]
    for each in (policy, other, sampler):
        assert each.idle == pytest.approx(sum(reason.seconds for reason in each.reasons))
        assert each.busy + each.idle == pytest.approx(8.5)

    waits = [Wait("rollout", "capacity", "", 5, 7), Wait("trainer", "a batch", "", 5, 6)]
    (shared,) = idleness([*synchronous(2, 1, swap=1, steps=1), Step(1, 5, 7), *waits])
    whys = ["trainer waits for a batch", "between calls: the script's own work"]
    assert [(reason.why, reason.seconds) for reason in shared.reasons] == [(why, 1) for why in whys]


def test_the_page_is_one_file_with_all_inside(tmp_path: Path) -> None:
    page = render(read_run(write(tmp_path / "mine", a_run())))
    assert not re.search(r"""https?:(?!//www\.w3\.org/2000/svg)|\ssrc=|<link|@import|url\(""", page)
    data = data_of(page)
    assert (data["name"], data["status"], data["efficiency"]) == ("mine", "finished", pytest.approx(4.5 / 8.5))
    lanes = cast("list[dict[str, object]]", data["lanes"])
    labels = [f"{lane['group']}: {lane['label']}" for lane in lanes]
    assert labels == ["waits: script", "waits: stream", "main: rank 0", "main: rank 1", "rollout: rank 0"]
    assert cast("list[dict[str, object]]", data["samples"])[0]["prompt"] == "a</script><b>&"
    assert (data["staleness"], data["dropped"]) == ([14, 2], {"stale": 1})
    assert data["config"] == 'algorithm = "grpo"\nahead = 1\n'


def test_what_is_cut_or_missing_is_left_out_of_the_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "killed", a_run())
    (folder / "summary.json").unlink()
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-7])
    content = make_content(read_run(folder))
    assert content.status == "not ended"
    assert (content.summary["steps"], content.summary["first_reward"]) == (1, 0.25)
    assert [step for step, _, _ in content.steps] == [0]
    assert "1 of the 20 lines of events.jsonl cannot be read, and are left out." in content.notes

    (folder / "events.jsonl").unlink()
    (folder / "metrics.jsonl").write_bytes(METRICS)
    content = make_content(read_run(folder))
    assert (content.lanes, content.total) == ([], None)
    assert [(curve.name, curve.y) for curve in content.curves] == [("reward", [0.25, 0.75]), ("loss", [0.5, None])]
    assert "There is no events.jsonl, so it is unknown when the ranks ran which calls." in content.notes
    assert data_of(render(Record(tmp_path)))["curves"] == []

    (folder / "metrics.jsonl").write_text(f'{{"step":0,"reward":{"9" * 400}}}\n{{"step":1,"reward":1}}\n', "utf-8")
    assert make_content(read_run(folder)).curves[0].y == [None, 1], "no float reaches the first"

    begun = make_content(Record(Path("begun"), events=a_run()[:3]))
    assert [lane.label for lane in begun.lanes] == ["script", "rank 0"]
    assert begun.efficiency is None


def test_a_large_run_makes_a_small_page_that_loses_no_span_and_counts_ranks_that_are_cut() -> None:
    events: list[Event] = [span("main", "update", 7.001, 7.9)]
    for step in range(1200):
        events += [span("main", "update", step + part / 20, step + part / 20 + 0.04) for part in range(20)]
        events += [Gauge("groups ready", step, step % 5), Step(step, step, step + 1)]
    lines: list[dict[str, object]] = [{"step": step, "reward": 0.5} for step in range(1200)]
    samples: list[dict[str, object]] = [{"step": step, "prompt": "x" * 10_000} for step in range(1000)]
    record = Record(Path("large"), {}, lines, samples, events)
    content = make_content(record)
    (lane,) = content.lanes
    assert sum(lane.count) == 24_001
    assert len(lane.began) <= 20_000
    assert lane.began == sorted(lane.began)
    assert (7.001, 0.899, 1) in zip(lane.began, lane.lasted, lane.count, strict=True)
    assert len(content.notes) == 4
    assert content.curves[0].y == pytest.approx([0.5] * 1000)
    assert content.gauges[0].y == pytest.approx([2] * len(content.gauges[0].y), abs=1)
    assert len(render(record)) < 3_000_000

    ranks = [span("main", "update", 0, 1, rank) for rank in range(100)]
    wide = make_content(Record(Path("wide"), events=[*ranks, Step(0, 0, 2)]))
    assert (len(wide.lanes), len(wide.idle)) == (64, 64)
    assert wide.notes == ["The timeline and the table of idle time show 64 of 100 ranks."]


def test_the_trace_has_a_process_a_mesh_and_a_thread_a_rank() -> None:
    entries = cast("list[dict[str, object]]", make_trace(a_run())["traceEvents"])
    names = {
        (entry["name"], entry["pid"], entry["tid"]): cast("dict[str, object]", entry["args"])["name"]
        for entry in entries
        if entry["name"] in ("process_name", "thread_name")
    }
    processes = [name for (kind, _, _), name in names.items() if kind == "process_name"]
    assert processes == ["controller", "mesh main", "mesh rollout"]
    updates = [entry for entry in entries if entry["name"] == "Policy.update" and entry["pid"] == 1]
    assert [names["thread_name", entry["pid"], entry["tid"]] for entry in updates] == ["rank 0"] * 2 + ["rank 1"] * 2
    assert (updates[0]["ph"], updates[0]["ts"], updates[0]["dur"]) == ("X", 4e6, 2e6)
    assert updates[0]["args"] == {"rows": 8, "tokens": 80}
    marks = [f"{entry['ph']} {entry['name']}" for entry in entries if entry["ph"] in ("C", "i")]
    assert marks == ["i batch 0", "i weights of version 1", "C groups ready", "C groups ready", "i batch 1"]
    moments = ((0, 2), (1, 3), (2, 4), (3, 5))
    some = [span("rollout", "generate", began, ended) for began, ended in moments]
    entries = cast("list[dict[str, object]]", make_trace(some)["traceEvents"])
    one, other, *rest = [entry["tid"] for entry in entries if entry["ph"] == "X"]
    assert one != other, "what overlaps stands in threads of its own"
    assert rest == [one, other]


def test_report_and_trace_write_to_the_runs_folder_or_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there are no runs under"):
        find_run("mine")
    folder = write(tmp_path / "runs" / "mine", a_run())
    assert type_in("report", "mine").status == 0
    assert data_of((folder / "report.html").read_text("utf-8"))["name"] == "mine"
    assert type_in("trace", "runs/mine", "--out", "mine.json").status == 0
    assert b"traceEvents" in (tmp_path / "mine.json").read_bytes()

    (folder / "events.jsonl").unlink()
    (tmp_path / "runs" / "empty").mkdir()
    for typed, told in {
        "report mnie": "mnie: no such run; did you mean mine?",
        "report something": "something: no such run; runs/ has empty, mine",
        "report empty": "runs/empty is not the folder of a run: none of metrics.jsonl",
        "trace mine": "runs/mine: nothing to trace: There is no events.jsonl",
        "report mine --out no/where.html": "no/where.html: cannot be written: No such file or directory",
    }.items():
        found = type_in(*typed.split())
        assert (found.status, told in found.err) == (1, True), found.err


def test_calls_that_share_a_rank_overlap_nothing() -> None:
    update, step = span("main", "update", 0, 8), Step(0, 0, 8)
    shared: list[Event] = [update, span("main", "generate", 0, 8), step]
    found = overlap(shared)
    assert found.efficiency == 0.5
    assert (found.total.rollout, found.total.training) == (4, 4)
    assert (found.total.both, found.total.rollout_alone, found.total.training_alone) == (0, 4, 4)
    apart = overlap([span("rollout", "generate", 0, 8), *shared]).total
    assert (apart.rollout, apart.training, apart.both, apart.rollout_alone) == (8, 4, 4, 4)
    two = overlap([span("rollout", "generate", 0, 8), span("rollout", "generate", 2, 6), update, step]).total
    assert (two.rollout, two.training, two.both) == (8, 8, 8)


def test_a_slow_judge_bounds_a_step_and_one_busy_sampler_of_eight_is_told() -> None:
    events: list[Event] = []
    for number, now in enumerate((0.0, 10.0)):
        events += [span("judge", "score", now, now + 10), span("rollout", "generate", now, now + 2)]
        events += [span("main", "update", now, now + 1), Wait("trainer", "a batch", "", now + 1, now + 10)]
        events += [span("rollout", "load", now + 4, now + 5), Step(number, now, now + 10)]
    found = overlap(events)
    assert found.efficiency == 1
    for step in found.steps:
        assert (step.rollout, step.training, step.scoring, step.bound) == (2, 1, 10, "scoring")
        assert (step.both, step.rollout_alone, step.scoring_alone, step.sync, step.other) == (1, 1, 8, 0, 0)
    events = [span("rollout", "generate", 0, 1.5 if rank else 10, rank) for rank in range(8)]
    events += [span("main", "update", 0, 3), Wait("trainer", "a batch", "", 3, 10), Step(0, 0, 10)]
    found = overlap(events)
    assert found.efficiency == 1
    assert found.busy == pytest.approx({"rollout": 20.5 / 80, "training": 0.3})
    assert make_content(Record(Path("uneven"), events=events)).busy == pytest.approx(found.busy)


ENDS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)
MESHES, CALLS = st.sampled_from(["main", "rollout"]), st.sampled_from(["generate", "update", "score", "load"])
SPANS = st.builds(
    lambda mesh, name, ends, rank: span(mesh, name, ends[0], ends[1], rank), MESHES, CALLS, ENDS, st.integers(0, 1)
)
WAITS = st.builds(lambda ends: Wait("trainer", "a batch", "", ends[0], ends[1]), ENDS)


@given(st.lists(SPANS, max_size=10), st.lists(WAITS, max_size=2))
def test_the_parts_of_a_step_add_up_to_it(spans: list[Span], waits: list[Wait]) -> None:
    found = overlap([*spans, *waits, Step(0, 1, 8), Step(1, 8, 20)])
    for step in found.steps:
        parts = (step.both, step.rollout_alone, step.training_alone, step.scoring_alone, step.sync, step.other)
        assert sum(parts) == pytest.approx(step.seconds)
        assert min(parts) >= -1e-9
        assert step.both + step.training_alone == pytest.approx(step.training)
        assert step.both <= step.rollout + 1e-9
    assert 0 <= found.efficiency <= 1 + 1e-9
    assert all(0 <= share <= 1 + 1e-9 for share in found.busy.values())


CONFIG = 'algorithm = "grpo"\nahead = 0\n\n[policy]\nbackend = "torch"\n'
UNUSED = "\n[policy.fsdp]\nreplicate = 1\n\n[sampler.vllm]\n"
EVENTS: list[Event] = [
    Span(1, "main", 0, "Sampler", "generate", 0, 2),
    Span(2, "main", 0, "Policy", "update", 2, 5),
    Step(0, 0, 6),
]


def of_numbers(config: str) -> Record:
    numbers: dict[str, object] = {"lr": 1.0, "kl": 0.0}
    lines = [{"step": step, "loss": -step, **numbers, "reward": step / 3, "entropy": 2.0 - step} for step in range(3)]
    evaluations: list[dict[str, object]] = [{"step": step, "eval/greedy": step / 4} for step in (0, 2)]
    return Record(Path("mine"), metrics=lines, evaluations=evaluations, events=EVENTS, config=config)


def test_learning_stands_in_front_and_what_says_nothing_does_not() -> None:
    content = make_content(of_numbers(CONFIG + UNUSED))
    names = [curve.name for curve in content.curves]
    assert names[: content.front] == ["reward", "eval/greedy", "entropy", "loss"]
    assert names[content.front :] == ["lr", "kl"]
    assert content.config == CONFIG
    assert make_content(of_numbers("no TOML")).config == "no TOML"
    assert content.efficiency is None
    assert make_content(of_numbers(CONFIG.replace("ahead = 0", "ahead = 1"))).efficiency == pytest.approx(3 / 6)


def test_where_the_time_went_is_told_in_text() -> None:
    told = dict(run_lines(Record(Path("mine"), events=[*EVENTS, Wait("trainer", "a batch", "", 0, 2)])))
    assert told["step time, mean"] == "6.00 s"
    assert told["parts of a step"].startswith("both at once: 0%, rollout alone: 33%, training alone: 50%, scoring: 0%")
    assert told["busy in a step"] == "rollout: 2.00 s, training: 3.00 s"
    assert (told["overlap efficiency"], told["bound by"]) == ("0.50", "training: 100%")
    assert dict(time_lines(1.0, {"sync": 1.0}, [], {}, []))["bound by"] == "new weights: 100%"
    assert told["main 0, idle a step"] == "1.00 s (between calls: the script's own work: 1.00 s)"
    aged = dict(run_lines(Record(Path("mine"), events=[*EVENTS, Delivery(0, 2, 8, [6, 2], {"stale": 1})])))
    assert (aged["rows by staleness"], aged["groups dropped"]) == ("0: 6, 1: 2", "stale: 1")
    assert run_lines(Record(Path("mine"))) == []
