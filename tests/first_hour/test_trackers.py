"""Numbers where people look at them: `run.log`, read back by the libraries themselves, without a network."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrl.run.recorder import Recorder
from meshrl.run.trackers import TrackedRun, Trackers, make_tracker
from tests.first_hour.terminal import FAKES, SMALL, done, refused

QUICK = (*FAKES, *SMALL, "prompts=4")
EVERY = ("run.samples_every=2", "run.checkpoint_every=2")
CODE = """
import json, sys

sys.modules["pandas"] = None  # no extra of ours brings it for MLflow
from meshrl.cli import main

for more in (["steps=2"], ["steps=4", "run.resume=true"]):
    try:
        main(["run", "grpo/quickstart", *sys.argv[1:], *more])
    except SystemExit as ended:
        assert not ended.code
del sys.modules["pandas"]
if "trackio" not in sys.argv[-1]:
    sys.exit()
from trackio.sqlite_storage import SQLiteStorage as storage

(name,) = storage.get_runs("meshrl")
artifacts = [each["name"] for each in storage.get_artifacts("meshrl")]
kept = [storage.get_logs("meshrl", name), storage.get_run_config("meshrl", name), artifacts]
open("trackio.json", "w").write(json.dumps(kept, default=str))
"""


def track(folder: Path, *libraries: str) -> Path:
    """Make a run of two steps and go on for two more, each library told to keep what it has in a folder."""
    tell = f"run.log={json.dumps(libraries)}"
    environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    command = [sys.executable, "-c", CODE, *QUICK, *EVERY, tell]
    ended = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert (ended.returncode, "receives nothing more" in ended.stderr) == (0, False), ended.stderr
    return folder


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return track(tmp_path_factory.mktemp("tracked"), "mlflow", "trackio")


def rewards(folder: Path) -> list[float]:
    lines = (folder / "runs/quickstart/metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def links(folder: Path) -> dict[str, str]:
    own = (folder / "runs/quickstart").resolve()
    return {"folder": str(own), "report": str(own / "report.html")}


def records(file: Path) -> Iterator[bytes]:
    """What wandb writes while it is offline: a log as LevelDB has it, in blocks of 32 KiB."""
    content, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        held += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield held
            held = b""


@pytest.mark.process
def test_wandb(tmp_path: Path) -> None:
    tracked = track(tmp_path, "tensorboard", "wandb")
    record = import_module("wandb.proto.wandb_internal_pb2").Record
    files = sorted(tracked.glob("runs/quickstart/wandb/offline-run-*/*.wandb"))
    assert len(files) == 1, "a resumed run writes all of it again, because wandb counts its lines from 0"
    told = [record.FromString(each) for file in files for each in records(file)]
    begun = [each.run for each in told if each.HasField("run") and each.run.run_id]
    assert {each.run_id for each in begun} == {(tracked / "runs/quickstart/run_id").read_text("utf-8").strip()}
    assert {(each.project, each.display_name) for each in begun} == {("meshrl", "quickstart")}
    config = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert (config["steps"], config["links"]) == (4, links(tracked))
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.history.item}
        for each in told
        if each.HasField("history")
    ]
    found = {line["step"]: line["reward"] for line in history if "reward" in line}
    assert found == dict(enumerate(rewards(tracked)))
    assert [line["step"] for line in history if "samples/path" in line or "samples" in line] == [0, 1, 2, 3]
    assert [each.artifact.type for each in told if each.HasField("artifact")].count("report") == 1


@pytest.mark.wide
@pytest.mark.process
@pytest.mark.xdist_group("trackers")
@pytest.mark.filterwarnings("default")
def test_mlflow(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tracked / 'mlflow.db'}")
    client = import_module("mlflow").MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("meshrl").experiment_id])
    assert (found.info.run_name, found.info.status) == ("quickstart", "FINISHED")
    assert found.data.params["policy.backend"] == "fake"
    assert links(tracked).items() <= {key.removeprefix("meshrl."): tag for key, tag in found.data.tags.items()}.items()
    history = client.get_metric_history(found.info.run_id, "reward")
    assert {each.step: each.value for each in history} == pytest.approx(dict(enumerate(rewards(tracked))))
    assert "eval/pass_1" in found.data.metrics
    files = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert files == {"config.toml", "samples.json", "summary.json", "report.html"}
    table = json.loads(Path(client.download_artifacts(found.info.run_id, "samples.json", ".")).read_bytes())
    assert table["columns"][:3] == ["step", "prompt", "completion"]
    assert {row[0] for row in table["data"]} == {0, 1, 2, 3}
    assert {len(row) for row in table["data"]} == {len(table["columns"])}
    assert json.loads(found.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    # What the client itself reads, and writes where pandas is there.
    rows = client.load_table(found.info.experiment_id, "samples.json", [found.info.run_id])
    assert (list(rows.columns), len(rows)) == (table["columns"], len(table["data"]))


@pytest.mark.wide
@pytest.mark.process
@pytest.mark.xdist_group("trackers")
def test_trackio(tracked: Path) -> None:
    logs, config, artifacts = json.loads((tracked / "trackio.json").read_bytes())
    assert {line["step"]: line["reward"] for line in logs if "reward" in line} == dict(enumerate(rewards(tracked)))
    assert [line["step"] for line in logs if "samples" in line] == [0, 1, 2, 3]
    assert (config["policy"]["backend"], config["links"]) == ("fake", links(tracked))
    assert artifacts == ["quickstart-report"]


OWN = """
import threading
import meshrl as rl
from meshrl.run.trackers import Tracker

told = []

class Mine(Tracker):
    def metrics(self, step, values):
        if "reward" in values:
            told.append((step, values["reward"]))

    def end(self, summary, report):
        print("heard the end")

class Breaks(Tracker):
    def metrics(self, step, values):
        raise OSError("no network")

class Hangs(Tracker):
    def metrics(self, step, values):
        threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def _own() -> None:
    Path("mine.py").write_text(OWN, "utf-8")


def told_to_mine() -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = sys.modules["meshrl_file_mine"].told
    return found


def test_one_of_ones_own_and_one_that_breaks_costs_the_run_nothing(tmp_path: Path) -> None:
    told = done("run", "grpo/quickstart", *QUICK, "steps=3", "run.log=['mine.py:Breaks', 'mine.py:Mine']").err
    assert told_to_mine() == [*enumerate(rewards(tmp_path))]
    assert len(told_to_mine()) == 3
    assert told.count("mine.py:Breaks receives nothing more of this run") == 1
    assert "OSError: no network" in told


def test_those_that_hang_are_left_behind_and_others_hear_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshrl.run.trackers.base._PATIENCE", 3.0)
    trackers = Trackers([f"mine.py:{name}" for name in ("Mine", "Hangs", "Hangs", "Hangs")])
    trackers.begin(tmp_path, {}, 0)
    for step in range(4):
        trackers.send(methodcaller("metrics", step, {"reward": 1.0}))
    trackers.end(tmp_path, {})
    out, err = capsys.readouterr()
    assert "heard the end" in out
    assert (out + err).count("it has not taken everything within 3 s") == 3


def test_wandb_online_has_each_number_once_after_an_interruption_whatever_came_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: list[dict[str, object]] = []
    run = SimpleNamespace(path="me/meshrl/1", define_metric=lambda *_, **__: None, log=server.append)
    stored = SimpleNamespace(scan_history=lambda **_: iter(list(server)))
    wandb = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")),
        login=lambda **_: True,
        init=lambda **_: run,
        Api=lambda: SimpleNamespace(run={run.path: stored}.__getitem__),
        Table=lambda **given: given["data"],
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lines = {step: {"reward": step / 10} for step in range(6)}
    for goes_on, begin, end in ((False, 0, 4), (True, 0, 6)):  # all of it is told again
        tracker = make_tracker("wandb")
        tracker.begin(TrackedRun("1", "run", None, tmp_path, {}, begin, goes_on))
        for step in range(begin, end):
            tracker.metrics(step, lines[step])
        tracker.metrics(1, {"eval/reward": 0.5})  # it has ended late, so the newest line is of an early step
        tracker.samples(0, [{"prompt": "a"}])
    tracker.metrics(3, {"eval/reward": 0.7})  # of an early step too, and new
    numbers = [(line["step"], name) for line in server for name in line if name != "step"]
    wanted = [*((step, "reward") for step in range(6)), (1, "eval/reward"), (3, "eval/reward"), (0, "samples")]
    assert sorted(numbers) == sorted(wanted)


@pytest.mark.filterwarnings("default")
def test_a_wrong_one_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    where_nobody_has_logged_in = SimpleNamespace(
        login=lambda *_, **__: False, setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode="online"))
    )
    monkeypatch.setitem(sys.modules, "wandb", where_nobody_has_logged_in)
    command = ("grpo/quickstart", *QUICK)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sqlalchemy", None)
        missing = "'mlflow' needs the package 'sqlalchemy': pip install 'meshrl[mlflow]'"
        assert missing in refused("check", *command, "run.log=mlflow")
    for log, said in {
        "tensorbord": "did you mean 'tensorboard'",
        "mine.py:Missing": "has no 'Missing'; it has Mine, Breaks, Hangs",
        "mine.py:told": "not a class that inherits from meshrl.Tracker",
        "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    }.items():
        for program in ("check", "run"):
            assert said in refused(program, *command, f"run.log={log}")
    assert not Path("runs").exists()


def test_a_run_that_makes_no_step_is_told_to_none(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", {}, trackers=Trackers(["mine.py:Mine"]))
    recorder.evaluation(0, {"reward": 1.0})
    recorder.close(RuntimeError("no memory"))
    assert told_to_mine() == []
