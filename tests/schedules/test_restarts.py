"""A run under which a machine fails, at any call of a role, is begun again by itself and ends as if none had failed."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import LocalEngine, Resources, RunConfig
from meshrl.engines.local import LocalSlot
from meshrl.errors import ConfigError, DataLost, EngineDied, MeshrlError, NoRoom, RankDied, RankFailed
from meshrl.events import Event, Restart
from meshrl.report import read_run, render
from meshrl.run import Run, run_job
from meshrl.testing import simulate
from tests.schedules.conftest import SETTINGS, Faults, Setting, check_kept, disturbed, outcome, spread, summary


def died() -> EngineDied:
    return EngineDied("the process of the engine has ended")


def rank_died() -> RankDied:
    return RankDied("Policy", 0, {"dp": 0}, "update", 7, "host", "killed by signal 9")


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        pytest.param([Setting("grpo", 0, False), Setting("ppo", 3, False)], 8, id="some"),
        pytest.param([each for each in SETTINGS if not each.meanwhile], None, marks=pytest.mark.wide, id="all"),
    ],
)
def test_a_fault_at_any_await_of_a_role_costs_nothing(
    settings: list[Setting], most: int | None, tmp_path: Path, faults: Faults
) -> None:
    for number, setting in enumerate(settings):
        base = tmp_path / f"{number}"
        faults.at = faults.calls = 0
        setting.simulate(base / "whole", restarts=1)
        whole, calls = outcome(base / "whole", setting), faults.calls
        assert "restarts" not in summary(base / "whole")
        faults.error = died
        for at in spread(calls, most):
            folder = base / str(at)
            faults.at, faults.calls = at + 1, 0
            with disturbed(setting, f"a fault at call {at} of {calls}"):
                logged = setting.simulate(folder, restarts=1)
                check_kept(folder, setting)
                told = sum("a machine failed" in line["event"] for line in logged)
                assert summary(folder).get("restarts", 0) == told
                assert told or setting.ahead, "what was drawn ahead and no step needed, may fail at the end"
                if not setting.ahead:
                    assert outcome(folder, setting) == whole


def test_a_restart_is_told(tmp_path: Path, faults: Faults) -> None:
    faults.at, faults.error = 40, died
    logged = SETTINGS[0].simulate(tmp_path, restarts=3)
    told = [line for line in logged if "a machine failed" in line["event"]]
    assert [line["event"] for line in told] == ["a machine failed: the run is restarted, number 1 of 3 (run.restarts)"]
    assert "the process of the engine has ended" in told[0]["error"]
    decoder = msgspec.json.Decoder(Event)
    events = [decoder.decode(line) for line in (tmp_path / "run/events.jsonl").read_bytes().splitlines()]
    (restart,) = [event for event in events if isinstance(event, Restart)]
    assert restart.number == 1
    assert "the process of the engine has ended" in restart.error
    assert (tmp_path / "run/events-1.jsonl").exists()
    assert "the run was begun again (restart 1)" in render(read_run(tmp_path / "run"))


def test_what_a_failed_run_held_is_let_go_before_the_next_begins(tmp_path: Path, faults: Faults) -> None:
    faults.at, faults.error = 40, died
    runs: list[weakref.ref[Run]] = []
    held: list[bool] = []

    def begun(run: Run) -> None:
        held.extend(each() is not None for each in runs)
        runs.append(weakref.ref(run))

    gc.disable()
    try:
        with capture_logs():
            simulate(lambda: run_job(SETTINGS[0].job(tmp_path, restarts=1), begun))
    finally:
        gc.enable()
    assert held == [False]


def test_a_run_ends_by_the_fault_that_no_restart_is_left_for(tmp_path: Path, faults: Faults) -> None:
    faults.at, faults.lasts, faults.error = 1, True, died
    with capture_logs() as logged, pytest.raises(RankFailed, match="the process of the engine has ended"):
        simulate(lambda: SETTINGS[0].run(tmp_path, restarts=2))
    assert sum("a machine failed" in line["event"] for line in logged) == 2
    assert summary(tmp_path)["status"] == "failed"


def test_a_restart_does_not_go_on_with_an_earlier_run(tmp_path: Path, faults: Faults) -> None:
    """Also where the fault comes before the first step, and the folder of the name is another run's."""
    setting = SETTINGS[0]
    for at in (1, 40):
        folder = tmp_path / f"{at}"
        faults.at = 0
        setting.simulate(folder, restarts=1)
        whole = outcome(folder, setting)
        faults.at, faults.calls, faults.error = at, 0, died
        setting.simulate(folder, restarts=1)
        assert summary(folder)["restarts"] == 1
        assert outcome(folder, setting) == whole
        assert sorted(path.name for path in folder.iterdir()) == ["run", "run-1"]
        assert "restarts" not in msgspec.json.decode((folder / "run-1/summary.json").read_bytes())


@dataclass
class Cluster:
    """Machines of which one fails, and comes back so many virtual seconds later: until then a mesh finds no room."""

    seconds: float
    failed: float | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        really = LocalEngine.reserve

        async def reserve(engine: LocalEngine, count: int, resources: Resources, log: str) -> Sequence[LocalSlot]:
            now = asyncio.get_running_loop().time()
            if self.failed is not None and now < self.failed + self.seconds:
                raise NoRoom("a mesh asks for 1 ranks with 1 CPU each, and the cluster has room for 0")
            return await really(engine, count, resources, log)

        monkeypatch.setattr(LocalEngine, "reserve", reserve)

    def fail(self) -> EngineDied:
        self.failed = asyncio.get_running_loop().time()
        return died()


def test_a_restart_waits_for_the_machine_that_failed(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = SETTINGS[0]
    setting.simulate(tmp_path / "whole", restarts=1)
    cluster = Cluster(seconds=100)
    cluster.install(monkeypatch)
    faults.at, faults.calls, faults.error = 40, 0, cluster.fail
    logged = setting.simulate(tmp_path, restarts=1)
    assert outcome(tmp_path, setting) == outcome(tmp_path / "whole", setting)
    told = [line["event"] for line in logged if "no room" in line["event"]]
    assert len(told) == 2, "a line a minute"
    assert "no room for the mesh 'main': waiting 600 s more (run.restart_wait)" in told[0]
    assert summary(tmp_path)["restarts"] == 1


def test_a_restart_does_not_wait_for_ever(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(seconds=float("inf"))
    cluster.install(monkeypatch)
    faults.at, faults.error = 40, cluster.fail
    told = r"the mesh 'main' found no room in the 600 s of run.restart_wait: a mesh asks for 1 ranks .* room for 0"
    with pytest.raises(NoRoom, match=told):
        SETTINGS[0].simulate(tmp_path, restarts=3)
    assert summary(tmp_path)["status"] == "failed"


def from_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_only_a_fault_of_a_machine_is_tried_again(tmp_path: Path) -> None:
    """What the script raises, and whether the run is begun again."""
    table: list[tuple[Exception, bool]] = [
        (rank_died(), True),
        (from_cause(RankFailed("Sampler", 0, {}, "generate", "", ""), died()), True),
        (from_cause(MeshrlError("the evaluation after 2 steps failed"), rank_died()), True),
        (ExceptionGroup("of a TaskGroup", [rank_died(), rank_died()]), True),
        (DataLost("node2", "nothing was heard of its host"), True),
        (ExceptionGroup("of a TaskGroup", [rank_died(), ValueError()]), False),
        (from_cause(RankFailed("Reward", 0, {}, "score", "", ""), ValueError()), False),
        (RankFailed("Reward", 0, {}, "score", "", ""), False),
        (from_cause(ValueError("of the user's"), rank_died()), False),
        (ConfigError("wrong"), False),
    ]
    wrong: list[str] = []
    for number, (error, again) in enumerate(table):
        lives: list[object] = []
        raised: Exception | None = None

        async def fails_once(run: object, _: object) -> None:
            lives.append(run)  # noqa: B023 -- called at once, here and below
            if len(lives) == 1:  # noqa: B023
                raise error  # noqa: B023

        job = SETTINGS[0].job(tmp_path / f"{number}", restarts=1)
        job = replace(job, script=replace(job.script, function=fails_once))
        try:
            with capture_logs():
                simulate(lambda: run_job(job))  # noqa: B023
        except Exception as of_the_run:  # noqa: BLE001 -- whichever it is
            raised = of_the_run
        right = len(lives) == 1 + again and raised is (None if again else error)
        wrong += [] if right else [f"{error!r}: {len(lives)} lives, and it raised {raised!r}"]
    assert not wrong


def test_restarts_need_checkpoints_and_no_schedule() -> None:
    with pytest.raises(ValueError, match=r"restarts = 2 needs a checkpoint to restart from, and none is written: set"):
        RunConfig(restarts=2)
    with pytest.raises(
        ValueError, match=r"deterministic = true records .* but restarts = 2 continues from the middle of one"
    ):
        RunConfig(restarts=2, checkpoint_every=1, deterministic=True)
