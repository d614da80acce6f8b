import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from meshrl.events import Restart
from meshrl.observe import live
from meshrl.observe.live import EVENTS, LiveRun
from meshrl.observe.page import POINTS, make_content
from meshrl.observe.run_files import NOW, PAUSED, RunStatus, Waits, ask, read_run
from meshrl.observe.samples import ROWS
from tests.observe.files import append, events, lines, metrics


def write(folder: Path, steps: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text('algorithm = "grpo"\nahead = 1\n[run]\ncheckpoint_every = 5\n', "utf-8")
    (folder / "metrics.jsonl").write_bytes(lines(*metrics(steps)))
    (folder / "evaluations.jsonl").write_bytes(lines({"step": 4, "seconds": 5.0, "eval/reward": 0.5}))
    (folder / "samples.jsonl").write_bytes(lines({"step": 0, "prompt": "a", "completion": "b", "reward": 1.0}))
    (folder / "events.jsonl").write_bytes(lines(*events(steps)))
    return folder


def shown(run: LiveRun) -> Any:
    while run.look()[1]:
        pass
    return run.content()


def rewards(run: LiveRun) -> Any:
    (reward,) = [curve for curve in shown(run)["curves"] if curve["name"] == "reward"]
    return reward


def test_a_line_counts_once_it_is_whole_and_one_without_end_is_left_behind(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    followed, line = LiveRun(folder), lines(*metrics(1, first=6))
    with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:9])
        assert rewards(followed)["x"] == list(range(6))
        file.write(line[9:])
        assert rewards(followed)["x"] == list(range(7))
        file.write(b"x" * (40 << 20) + b"\n" + lines(*metrics(1, first=7)))
        assert rewards(followed)["x"] == list(range(8))


def test_the_page_of_a_run_is_that_of_its_report(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    (folder / "summary.json").write_bytes(b'{"status":"finished","steps":6,"wall_s":7.0,"exact_match_after":0.5}')
    followed = LiveRun(folder)
    assert followed.look() == (True, False)
    found = followed.content()
    report = msgspec.to_builtins(make_content(read_run(folder)))
    assert {key: found[key] for key in report} == report
    pace = {"steps_per_minute": 60.0, "tokens_per_second": 30.0, "staleness": 1.5, "step_s": 1.0}
    assert found["pace"] == pace
    assert followed.look() == (False, False)


def test_a_long_run_is_shown_by_its_newest_events_and_counts_all(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", steps=4 * EVENTS)
    append(folder / "samples.jsonl", *({"step": at, "prompt": "a"} for at in range(ROWS + 1000)))
    followed = LiveRun(folder)
    found = shown(followed)
    assert found["steps"][-1] == (4 * EVENTS - 1, 4.0 * EVENTS, 4.0 * EVENTS + 1)
    assert sum(len(lane["began"]) for lane in found["lanes"]) <= EVENTS
    assert found["staleness"] == [3 * 4 * EVENTS, 4 * EVENTS]
    assert found["dropped"] == {"stale": 4 * EVENTS}
    assert [each["step"] for each in found.pop("samples")] == [*range(1000, 1000 + ROWS)]
    assert len(msgspec.json.encode(found)) < 1 << 20
    reward = rewards(followed)
    assert len(reward["x"]) <= POINTS
    assert reward["y"] == pytest.approx([(first + (reward["x"][1] - 1) / 2) / 8 for first in reward["x"]], rel=1e-4)


def test_the_tokens_of_a_row_are_read_where_its_line_is(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    file, followed = folder / "samples.jsonl", LiveRun(folder)
    with file.open("ab") as opened:
        opened.write(b"no line\n" + lines(*({"step": at, "tokens": {"tokens": [at]}} for at in range(1, ROWS + 2))))
    heads = shown(followed)["samples"]
    assert (heads[0]["at"], heads[0]["step"], heads[-1]["step"], heads[-1]["tokens"]) == (2, 2, ROWS + 1, True)
    assert "1 lines of samples.jsonl cannot be read, and are left out." in shown(followed)["notes"]
    assert [followed.tokens(head["at"]) for head in (heads[0], heads[-1])] == [
        b'{"tokens":[2]}',
        b'{"tokens":[%d]}' % (ROWS + 1),
    ]
    assert [followed.tokens(at) for at in (-1, 1, ROWS + 2)] == [None] * 3
    file.write_bytes(lines({"step": 0, "prompt": "of another run"}))
    assert followed.tokens(heads[-1]["at"]) is None, "the file is another one by now"
    assert [(head["at"], head["tokens"]) for head in shown(followed)["samples"]] == [(0, False)]


def test_a_page_has_images_of_some_rows_if_there_are_many(tmp_path: Path) -> None:
    folder, image = write(tmp_path / "mine"), "x" * (1 << 19)
    append(folder / "samples.jsonl", *({"step": step, "at": 0, "images": [image]} for step in range(1, 12)))
    found = shown(LiveRun(folder))
    assert [head["at"] for head in found["samples"]] == list(range(12)), "a column of this name does not count"
    assert [head["step"] for head in found["samples"] if "images" in head] == [1, 3, 5, 7, 9, 11]
    assert "6 of 11 rows with images are shown with them." in found["notes"]
    assert found["samples"] == msgspec.to_builtins(make_content(read_run(folder)).samples)


def test_how_far_a_run_is(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    followed = LiveRun(folder)
    assert shown(followed)["status"] == "not begun"
    write(folder)
    assert shown(followed)["status"] == "not ended"
    (folder / NOW).write_bytes(msgspec.json.encode(RunStatus(3.0, [], [])))
    assert shown(followed)["status"] == "running"
    (folder / NOW).write_bytes(msgspec.json.encode(RunStatus(3.5, [Waits("script", PAUSED, "a file", 0.5)], [])))
    assert shown(followed)["status"] == "paused"
    ask(folder, "checkpoint")
    assert shown(followed)["asked"] == ["checkpoint"]
    append(folder / "events.jsonl", Restart(3.0, 1, "a rank died"))
    assert any("a rank died" in note for note in shown(followed)["notes"])
    (folder / "summary.json").write_bytes(b'{"status":"failed","error":"all is lost"}')
    (folder / NOW).unlink()
    assert shown(followed)["status"] == "failed"
    (folder / "summary.json").write_bytes(b'{"status":"interrupted"}')
    assert shown(followed)["status"] == "interrupted"


def test_whether_a_run_lives_is_seen_whatever_its_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, clock = write(tmp_path / "mine"), [5.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 2e9))
    seen = LiveRun(folder)
    for number, behind in enumerate((60, -3600)):
        (folder / NOW).write_bytes(msgspec.json.encode(RunStatus(3.0 + number, [], [])))
        os.utime(folder / NOW, (2e9 - behind, 2e9 - behind))
        for status in ("running", "running", "silent"):
            seen.look()
            assert (seen.status, seen.is_under_way()) == (status, status == "running")
            clock[0] += live.SILENT / 2
    assert seen.now is None


def test_a_reward_that_is_none_stops_nothing(tmp_path: Path) -> None:
    for number, reward in enumerate(("1" + "0" * 400, "[" * 100_000, '{"a":1}', "true")):
        folder = write(tmp_path / f"{number}")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step":6,"reward":{reward}}}\n{{"step":7,"reward":0.5}}\n')
        summary = shown(LiveRun(folder))["summary"]
        assert (summary["first_reward"], summary["last_reward"]) == (0.0, 0.5)


def test_a_run_that_goes_on_from_a_checkpoint_is_read_anew_where_its_files_were_cut(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    followed = LiveRun(folder)
    followed.look()
    (folder / "metrics.jsonl").write_bytes(lines(*metrics(2), {"step": 2, "seconds": 9.0, "reward": 7.0}))
    (folder / "events.jsonl").rename(folder / "events-1.jsonl")
    (folder / "events.jsonl").write_bytes(lines(*events(1)))
    assert rewards(followed)["y"] == [0, 0.125, 7.0]
    assert shown(followed)["steps"] == [(0, 1.0, 2.0)]
