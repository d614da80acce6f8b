"""The files of a run."""

import asyncio
import io
import tomllib
from importlib import import_module
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from structlog.testing import capture_logs

from meshrl import Batch, Metrics, Ragged, Run, RunConfig
from meshrl.run.recorder import Recorder
from meshrl.trackers import Trackers


def lines(path: Path) -> list[dict[str, object]]:
    return [msgspec.json.decode(line, type=dict[str, object]) for line in path.read_bytes().splitlines()]


def summary(folder: Path) -> dict[str, object]:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=dict[str, object])


def test_a_run_that_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with capture_logs(), Recorder(folder, {"steps": 2}) as recorder:
        recorder.begin(2)
        recorder.step(0, {"reward": 0.25, "loss": 0.5, "tokens": 10})
        recorder.step(1, {"reward": 0.75, "loss": float("nan"), "tokens": 12})
        recorder.summary(exact_match_before=0.5)
        recorder.summary(exact_match_after=np.float32(0.75), by_length={"3": [1, 2]})
    first, second = lines(folder / "metrics.jsonl")
    assert [first["step"], second["step"]] == [0, 1]
    assert (first["reward"], first["loss"], second["loss"]) == (0.25, 0.5, None)
    assert isinstance(first["seconds"], float)
    found = summary(folder)
    assert found.pop("wall_s") == pytest.approx(second["seconds"], abs=1)
    assert found == {
        "status": "finished",
        "steps": 2,
        "tokens": 22,
        "first_reward": 0.25,
        "last_reward": 0.75,
        "exact_match_before": 0.5,
        "exact_match_after": 0.75,
        "by_length": {"3": [1, 2]},
    }
    assert not list(folder.glob("*.part"))


def test_a_step_can_be_read_at_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "mine", {}) as recorder:
        recorder.step(0, {"loss": 1.0})
        assert lines(tmp_path / "mine" / "metrics.jsonl")[0]["loss"] == 1.0


def test_the_resolved_configuration_can_be_run_again(tmp_path: Path) -> None:
    resolved = {"algorithm": "grpo", "policy": {"lr": 1e-4, "betas": (0.9, 0.95), "clip": None}, "text": 'a "b"\n'}
    with Recorder(tmp_path / "mine", resolved):
        pass
    written = tomllib.loads((tmp_path / "mine" / "config.toml").read_text("utf-8"))
    assert written == {"algorithm": "grpo", "policy": {"lr": 1e-4, "betas": [0.9, 0.95]}, "text": 'a "b"\n'}


def test_tensorboard_reads_the_numbers(tmp_path: Path) -> None:
    with Recorder(tmp_path / "mine", {}, trackers=Trackers(["tensorboard"])) as recorder:
        recorder.step(0, {"loss": 2.0})
        recorder.step(1, {"loss": 1.0})
    (path,) = (tmp_path / "mine").glob("*tfevents*")
    loader = import_module("tensorboard.backend.event_processing.event_file_loader").EventFileLoader
    events = [event for event in loader(str(path)).Load() if event.summary.value]
    assert [event.step for event in events] == [0, 1]
    assert [event.summary.value[0].tag for event in events] == ["loss", "loss"]
    assert [event.summary.value[0].tensor.float_val[0] for event in events] == [2.0, 1.0]


async def test_samples_are_spread_over_the_batch(tmp_path: Path) -> None:
    count = 64
    batch = Batch.of(
        prompt=[f"p{index}" for index in range(count)],
        completion=["c"] * count,
        answer=["a"] * count,
        rewards=np.arange(count, dtype=np.float32),
        reward_error=[None] * (count - 1) + ["ValueError: no"],
    )
    with Recorder(tmp_path / "mine", {}) as recorder:
        await recorder.samples(3, batch)
        await recorder.samples(4, batch.select(np.arange(2)).only("prompt"))
        await recorder.samples(5, batch.select(np.arange(0)))
    found = lines(tmp_path / "mine" / "samples.jsonl")
    assert len(found) == 10
    assert found[0] == {
        "step": 3,
        "prompt": "p0",
        "completion": "c",
        "answer": "a",
        "reward_error": None,
        "reward": 0.0,
    }
    assert found[7]["reward_error"] == "ValueError: no"
    assert found[8:] == [{"step": 4, "prompt": "p0"}, {"step": 4, "prompt": "p1"}]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("no luck"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (asyncio.CancelledError(), "interrupted"),
    ],
)
def test_a_run_that_ends_early(tmp_path: Path, error: BaseException, status: str) -> None:
    recorder = Recorder(tmp_path / "mine", {})
    recorder.step(0, {"loss": 1.0})
    recorder.close(error)
    found = summary(tmp_path / "mine")
    assert found["status"] == status
    assert found["steps"] == 1
    assert found["first_reward"] is None
    assert found["error"] == f"{type(error).__name__}: {error}"


def test_an_earlier_run_is_renamed_and_never_deleted(tmp_path: Path) -> None:
    with capture_logs() as logs:
        for number in range(3):
            Recorder(tmp_path / "mine", {"number": number}).close(None)
    assert (tmp_path / "mine" / "config.toml").read_text("utf-8") == "number = 2\n"
    assert (tmp_path / "mine-1" / "config.toml").read_text("utf-8") == "number = 0\n"
    assert (tmp_path / "mine-2" / "config.toml").read_text("utf-8") == "number = 1\n"
    assert f"the earlier run is now in {tmp_path / 'mine-2'}" in logs[1]["event"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with Recorder(tmp_path / "mine", {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_plain_lines_for_the_first_and_the_last_step(tmp_path: Path) -> None:
    with capture_logs() as logs, Recorder(tmp_path / "mine", {}) as recorder:
        recorder.begin(4)
        for step in range(4):
            recorder.step(step, {"reward": 0.5, "loss": 0.123456, "unwatched": 1.0})
    assert [log["event"] for log in logs] == ["step 1/4", "step 4/4"]
    assert (logs[0]["reward"], logs[0]["loss"], logs[1]["left"]) == ("0.5", "0.1235", "0s")
    assert "unwatched" not in logs[0]


def test_a_live_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def terminal(*, stderr: bool) -> Console:
        assert stderr
        return Console(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr("meshrl.run.progress.Console", terminal)
    with capture_logs() as logs, Recorder(tmp_path / "mine", {}) as recorder:
        recorder.begin(2)
        recorder.step(0, {"reward": 0.5})
        recorder.step(1, {"reward": 0.75})
    assert not logs
    assert "2/2" in screen.getvalue()
    assert "reward=0.75" in screen.getvalue()


async def test_what_a_run_adds_to_the_numbers_of_a_step(tmp_path: Path) -> None:
    metrics = Metrics.of(correction=(6.0, 8.0), correction_squared=(9.0, 8.0))
    batch = Batch.of(
        tokens=Ragged.of([[1, 2], [3, 4], [5], [6]], np.int32),
        staleness=np.array([0, 2, 2, 3], np.int32),
        rewards=np.array([1, 0, 1, 1], np.float32),
    )
    with capture_logs():
        async with Run(RunConfig(name="mine", folder=str(tmp_path))) as run:
            async for _ in run.steps(1):
                await run.record(metrics, batch, lr=0.5)
    (step,) = lines(run.folder / "metrics.jsonl")
    assert (step["staleness"], step["staleness_max"]) == (1.75, 3.0)
    assert step["effective_sample_size"] == 0.5
    assert (step["rows"], step["tokens"], step["reward"], step["lr"]) == (4.0, 6.0, 0.75, 0.5)
