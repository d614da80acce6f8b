"""A run that is killed, interrupted or loses a machine, at any await, goes on and ends as if nothing had failed.

Runs are of `grpo` and `ppo`, on roles without a model.
"""

import ast
import asyncio
import gc
import types
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import Batch, LocalEngine, Metrics, PolicyConfig, Resources, RunConfig, Task, testing
from meshrl.algo import Loss
from meshrl.config import validate
from meshrl.engines.local import LocalSlot
from meshrl.errors import ConfigError, DataLost, EngineDied, MeshrlError, NoRoom, RankDied, RankFailed, SetAside
from meshrl.events import Event, Restart
from meshrl.observe import read_run, render
from meshrl.run import Job, Run, audit_run, run_job
from meshrl.testing import simulate
from tests.algorithms.pages import FAKE, FAKES, lines, numbers, script
from tests.support.kills import KillPoints

STEPS, PROMPTS = 3, 2


class Diary(testing.FakePolicy):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, skill=0.4, rate=0.05)
        self.trained: list[list[int]] = []
        self.copied: list[list[int]] = []
        self.place: Path | None = None

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        self.trained.append(sorted(set(batch.groups.tolist())))
        return await super().update(batch, loss)

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        await super().checkpoint(folder, wait, adapter)
        self.copied, self.place = self.trained.copy(), Path(folder)
        if wait:
            await self.written()

    async def written(self) -> None:
        if self.place and self.place.is_dir():
            (self.place / "diary.json").write_bytes(msgspec.json.encode(self.copied))

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        await super().restore(folder, adapter, optimizer)
        self.trained = msgspec.json.decode(Path(folder, "diary.json").read_bytes(), type=list[list[int]])

    async def save(self, folder: str, adapter: str | None = None) -> None:
        await super().save(folder, adapter)
        Path(folder, "diary.json").write_bytes(msgspec.json.encode(self.trained))


@dataclass
class Faults(testing.Latency):
    at: int = 0
    error: Callable[[], Exception] = Exception
    lasts: bool = False
    calls: int = 0

    def draw(self, random: Random, batch: Batch | None) -> float:
        self.calls += 1
        if self.calls == self.at or (self.lasts and self.calls > self.at):
            raise self.error()
        return testing.Lognormal(0.3, 1).draw(random, batch)


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    takes = Faults()
    policy = testing.delayed(Diary, update=takes, weights=takes, logprobs=takes, written=takes)
    critic = testing.delayed(testing.FakeCritic, update=takes, advantages=takes)
    roles = {
        "FakePolicy": testing.delayed(policy, checkpoint=takes, restore=takes, save=takes),
        "FakeCritic": testing.delayed(critic, checkpoint=takes, restore=takes, save=takes),
        "FakeSampler": testing.delayed(testing.FakeSampler, generate=takes, load=takes),
        "FakeReward": testing.delayed(testing.FakeReward, score=takes),
        "FakeReference": testing.delayed(testing.FakeReference, logprobs=takes),
    }
    for name, role in roles.items():
        monkeypatch.setattr(f"meshrl.testing.{name}", role)
    task = Task(train=numbers(0, 5), held_out=numbers(0, 2))  # the second epoch begins in the last step
    monkeypatch.setattr(Task, "load", lambda _: task)
    return takes


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What each of many runs would pay for again.

    No run waits for a real disk, or looks for backends in other packages than meshrl, and hundreds of simulations each
    collect their own garbage, not all that was there before.
    """
    own = [metadata.distribution("meshrl")]
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: own)
    monkeypatch.setattr("os.fsync", lambda _: None)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass(frozen=True)
class Setting:
    algorithm: str
    ahead: int
    meanwhile: bool

    def __str__(self) -> str:
        return f"{self.algorithm}, ahead={self.ahead}{', written meanwhile' if self.meanwhile else ''}"

    async def run(self, folder: Path, restarts: int = 0) -> None:
        await run_job(self.job(folder, restarts))

    def simulate(self, folder: Path, restarts: int = 0) -> Sequence[Mapping[str, Any]]:
        with capture_logs() as logged:
            testing.simulate(lambda: self.run(folder, restarts))
        return logged

    def job(self, folder: Path, restarts: int = 0) -> Job:
        table = {
            **FAKES,
            **dict.fromkeys(("reference", "critic") if self.algorithm == "ppo" else ("reference",), FAKE),
            "sampling": {"n": 2},
            "prompts": PROMPTS,
            "minibatches": 2,
            "loss": {"kl": 0.1, "anchor": "trainer"},
            "evaluation": {"every": 2, "pause_training": not self.meanwhile},
            "ahead": self.ahead,
            "steps": STEPS,
        }
        config = validate(script(self.algorithm).schema, table, "test")
        every_step = {"samples_every": 1, "checkpoint_every": 1, "checkpoint_async": self.meanwhile}
        given = {"folder": str(folder), "meshes": {"main": {"cpus": 0}}, "log": [], **every_step}
        settings = RunConfig.model_validate({**given, "resume": not restarts, "restarts": restarts})
        resolved: dict[str, object] = {**config.model_dump(mode="json"), "run": settings.model_dump(mode="json")}
        return Job(Path("test"), script(self.algorithm), settings, config, resolved)


SETTINGS = [Setting(*each) for each in product(("grpo", "ppo"), (0, 1, 3), (False, True))]
FEW = [Setting("grpo", 0, True), Setting("ppo", 0, False), Setting("grpo", 3, False), Setting("ppo", 1, True)]
"""Each two values beside each other."""


def some_or_all(some: list[Setting], places: int, **all_of: list[Setting]) -> pytest.MarkDecorator:
    """`settings`, and at how many places (`most`) each is disturbed: all where there is no number, in `wide`."""
    wide = [pytest.param(each, None, marks=pytest.mark.wide, id=name) for name, each in all_of.items()]
    return pytest.mark.parametrize(("settings", "most"), [pytest.param(some, places, id="some"), *wide])


SOME_OR_ALL = some_or_all(
    FEW, 4, **{f"all-{ahead}": [each for each in SETTINGS if each.ahead == ahead] for ahead in (0, 1, 3)}
)


def spread(count: int, most: int | None) -> Sequence[int]:
    """All of so many places; or one in each of `most` equal stretches, the same each time."""
    if most is None or count <= most:
        return range(count)
    draw = Random(count)
    return [draw.randrange(each * count // most, (each + 1) * count // most) for each in range(most)]


@contextmanager
def disturbed(setting: Setting, how: str) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"{setting}: {how}")
        raise


def summary(folder: Path) -> dict[str, object]:
    return msgspec.json.decode((folder / "run/summary.json").read_bytes(), type=dict[str, object])


def check_kept(folder: Path, setting: Setting) -> None:
    found = audit_run(folder / "run")
    assert found.status == "finished"
    assert found.holds, [verdict.breaches for verdict in found.verdicts]
    assert found.steps == STEPS
    assert found.versions.largest is not None
    assert found.versions.largest <= setting.ahead
    assert not found.prompts.all_missing
    diary = msgspec.json.decode((folder / "run/model/diary.json").read_bytes(), type=list[list[int]])
    updates = Counter(chain.from_iterable(diary))
    assert len(found.prompts.trained) == len(updates) == STEPS * PROMPTS
    assert len(diary) == 2 * STEPS, "a step has two updates"
    step_of = {group: number // 2 for number, groups in reversed([*enumerate(diary)]) for group in groups}
    assert all(step_of[group] == number // 2 for number, groups in enumerate(diary) for group in groups)


def outcome(folder: Path, setting: Setting) -> dict[str, object]:
    run = folder / "run"
    return {
        "metrics": lines(run / "metrics.jsonl"),
        # What an evaluation finds for which nothing waits hangs on when it draws.
        "samples": [row for row in lines(run / "samples.jsonl") if not (setting.meanwhile and row.get("held_out"))],
        "evaluations": [row["step"] if setting.meanwhile else row for row in lines(run / "evaluations.jsonl")],
        "summary": {key: told for key, told in summary(folder).items() if key not in ("wall_s", "restarts")},
        "model": {path.name: path.read_bytes() for path in sorted((run / "model").iterdir())},
        "states": {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("checkpoints/*/*/*"))},
        "files": sorted(path.name for path in run.iterdir() if not path.name.startswith("events-")),
    }


def died() -> EngineDied:
    return EngineDied("the process of the engine has ended")


def rank_died() -> RankDied:
    return RankDied("Policy", 0, {"dp": 0}, "update", 7, "host", "killed by signal 9")


@some_or_all(
    [Setting("grpo", 0, False), Setting("ppo", 3, False)], 8, all=[each for each in SETTINGS if not each.meanwhile]
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


def test_a_restart_is_told_and_begins_when_what_the_failed_run_held_is_let_go(tmp_path: Path, faults: Faults) -> None:
    faults.at, faults.error = 40, died
    runs: list[weakref.ref[Run]] = []
    held: list[bool] = []

    def begun(run: Run) -> None:
        held.extend(each() is not None for each in runs)
        runs.append(weakref.ref(run))

    gc.disable()
    try:
        with capture_logs() as logged:
            simulate(lambda: run_job(SETTINGS[0].job(tmp_path, restarts=3), begun))
    finally:
        gc.enable()
    assert held == [False]
    (told,) = [line for line in logged if "a machine failed" in line["event"]]
    assert told["event"] == "a machine failed: the run is restarted, number 1 of 3 (run.restarts)"
    events = (tmp_path / "run/events.jsonl").read_bytes().splitlines()
    (restart,) = [event for line in events if isinstance(event := msgspec.json.decode(line, type=Event), Restart)]
    assert restart.number == 1
    for error in (told["error"], restart.error):
        assert "the process of the engine has ended" in error
    assert (tmp_path / "run/events-1.jsonl").exists()
    assert "the run was begun again (restart 1)" in render(read_run(tmp_path / "run"))


def test_a_run_ends_by_the_fault_that_no_restart_is_left_for(tmp_path: Path, faults: Faults) -> None:
    faults.at, faults.lasts, faults.error = 1, True, died
    with capture_logs() as logged, pytest.raises(RankFailed, match="the process of the engine has ended"):
        simulate(lambda: SETTINGS[0].run(tmp_path, restarts=2))
    assert sum("a machine failed" in line["event"] for line in logged) == 2
    assert summary(tmp_path)["status"] == "failed"


def test_a_restart_does_not_go_on_with_an_earlier_run(tmp_path: Path, faults: Faults) -> None:
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


def machine_fails(faults: Faults, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """At a call, for so many virtual seconds: until then a mesh finds no room."""
    really, back = LocalEngine.reserve, 0.0

    async def reserve(engine: LocalEngine, count: int, resources: Resources, log: str) -> Sequence[LocalSlot]:
        if asyncio.get_running_loop().time() < back:
            raise NoRoom("a mesh asks for 1 ranks with 1 CPU each, and the cluster has room for 0")
        return await really(engine, count, resources, log)

    def fail() -> EngineDied:
        nonlocal back
        back = asyncio.get_running_loop().time() + seconds
        return died()

    monkeypatch.setattr(LocalEngine, "reserve", reserve)
    faults.at, faults.calls, faults.error = 40, 0, fail


def test_restarts_wait_for_the_failed_machine(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS[0]
    setting.simulate(tmp_path / "whole", restarts=1)
    machine_fails(faults, monkeypatch, seconds=100)
    logged = setting.simulate(tmp_path, restarts=1)
    assert outcome(tmp_path, setting) == outcome(tmp_path / "whole", setting)
    told = [line["event"] for line in logged if "no room" in line["event"]]
    assert len(told) == 2, "a line a minute"
    assert "no room for the mesh 'main': waiting 600 s more (run.restart_wait)" in told[0]
    assert summary(tmp_path)["restarts"] == 1


def test_a_restart_does_not_wait_for_ever(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_fails(faults, monkeypatch, seconds=float("inf"))
    told = r"the mesh 'main' found no room in the 600 s of run.restart_wait: a mesh asks for 1 ranks .* room for 0"
    with pytest.raises(NoRoom, match=told):
        SETTINGS[0].simulate(tmp_path, restarts=3)
    assert summary(tmp_path)["status"] == "failed"


def from_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_only_a_fault_of_a_machine_is_tried_again(tmp_path: Path) -> None:
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

    def lived(error: Exception, folder: Path, restarts: int = 1) -> tuple[int, Exception | None]:
        lives: list[object] = []

        async def fails_once(run: object, _: object) -> None:
            lives.append(run)
            if len(lives) == 1:
                raise error

        job = SETTINGS[0].job(folder, restarts=restarts)
        job = replace(job, script=replace(job.script, function=fails_once))
        try:
            simulate(lambda: run_job(job))
        except Exception as raised:  # noqa: BLE001 -- whichever it is
            return len(lives), raised
        return len(lives), None

    with capture_logs():
        for number, (error, again) in enumerate(table):
            expected = (2, None) if again else (1, error)
            assert lived(error, tmp_path / f"{number}") == expected, repr(error)
        aside = ExceptionGroup("of a TaskGroup", [SetAside("an earlier checkpoint exists")])
        assert lived(aside, tmp_path / "aside", restarts=0) == (2, None)


def test_restarts_need_checkpoints_and_no_schedule() -> None:
    with pytest.raises(ValueError, match=r"restarts = 2 needs a checkpoint to restart from, and none is written: set"):
        RunConfig(restarts=2)
    with pytest.raises(ValueError, match=r"deterministic = true records .* but restarts = 2 continues from the middle"):
        RunConfig(restarts=2, checkpoint_every=1, deterministic=True)


def awaits(path: Path) -> Iterator[range]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Await):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.AsyncFor | ast.AsyncWith):
            yield range(node.lineno, node.body[0].lineno)


def watched(setting: Setting, runs: Path) -> KillPoints:
    points = KillPoints(runs, runs.with_name(f"{runs.name}-copies"), [script(setting.algorithm).path])
    with capture_logs():
        points.watch(lambda: setting.run(runs))
    check_kept(runs, setting)
    return points


def go_on(folder: Path, setting: Setting, whole: dict[str, object], after: str) -> None:
    """Begin again what has ended somehow; it ends well, and as one that nothing happened to if nothing is ahead."""
    with disturbed(setting, after):
        setting.simulate(folder)
        check_kept(folder, setting)
        if not setting.ahead:
            assert outcome(folder, setting) == whole


@pytest.mark.slow
@SOME_OR_ALL
def test_a_run_that_is_killed_at_any_await_goes_on(settings: list[Setting], most: int | None, tmp_path: Path) -> None:
    for number, setting in enumerate(settings):
        runs = tmp_path / f"{number}"
        runs.mkdir()
        points = watched(setting, runs)
        whole, path = outcome(runs, setting), script(setting.algorithm).path
        killed = {line for file, line in points.lines if file == str(path)}
        assert not [lines for lines in awaits(path) if killed.isdisjoint(lines)], "an await at which nobody was killed"
        for at in spread(len(points.remains), most):
            go_on(points.remains[at].folder, setting, whole, f"killed after {points.remains[at].after}")


@types.coroutine
def interrupted(main: Coroutine[object, object, None], at: int, stood: list[str]) -> Generator[object, object, None]:
    """The program, cancelled at one of its awaits as by Ctrl-C; `stood` gets the task of each."""
    raised: BaseException | None = None
    while True:
        try:
            awaited = main.send(None) if raised is None else main.throw(raised)
        except StopIteration:
            return
        task = asyncio.current_task()
        assert task is not None
        stood.append(task.get_name())
        if len(stood) == at:
            task.cancel()
        raised = None
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 -- which is the program's
            raised = error


@pytest.mark.slow
@SOME_OR_ALL
def test_a_run_interrupted_at_any_await_goes_on(settings: list[Setting], most: int | None, tmp_path: Path) -> None:
    def run(setting: Setting, folder: Path, at: int = 0) -> int:
        stood: list[str] = []

        async def main() -> None:
            await interrupted(setting.run(folder), at, stood)

        with capture_logs(), suppress(asyncio.CancelledError):
            simulate(main)
        return len(stood)

    for number, setting in enumerate(settings):
        base = tmp_path / f"{number}"
        count = run(setting, base / "whole")
        whole = outcome(base / "whole", setting)
        for at in spread(count, most):
            run(setting, base / str(at), at + 1)
            go_on(base / str(at), setting, whole, f"interrupted at await {at} of {count}")
