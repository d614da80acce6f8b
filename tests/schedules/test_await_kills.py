"""A controller that is killed at any await goes on: each prompt is trained once or dropped, and the bound holds.

`grpo` and `ppo`, unchanged, on roles without a model in virtual time. Every moment of a run is noted at which a kill
could end it (`meshrl.testing.KillPoints`), and from each state of the disk that was there a run goes on to its end.
"""

import ast
import asyncio
import shutil
import types
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import meshrl
from meshrl.testing import KillPoints, simulate
from tests.schedules.conftest import SETTINGS, Setting, check_kept, outcome, script

MESHRL = Path(meshrl.__file__).parent
RUN = "checkpoints", "control", "periodic", "recorder", "restarts", "room", "run"
ROLLOUT = "condition", "producer", "replay", "replicas", "stream", "synchronous"
GONE_THROUGH = [
    *(MESHRL / "run" / f"{name}.py" for name in RUN),
    *(MESHRL / "rollout" / f"{name}.py" for name in ROLLOUT),
    MESHRL / "evaluation/judge.py",
]
"""Where the awaits lie that a run makes beside its script's: its steps, its stream, its checkpoints."""
NOT_REACHED = {
    ("checkpoints.py", "write"): (1, "a checkpoint that fails"),
    ("checkpoints.py", "settle"): (1, "a checkpoint that fails"),
    ("checkpoints.py", "close"): (1, "a checkpoint that fails"),
    ("checkpoints.py", "_finish"): (1, "a checkpoint that fails"),
    ("checkpoints.py", "_drop"): (1, "a checkpoint that fails"),
    ("checkpoints.py", "keep"): (1, "a script's own state"),
    ("run.py", "keep"): (1, "a script's own state"),
    ("periodic.py", "turn"): (1, "weights that are published for an evaluation alone"),
    ("periodic.py", "close"): (1, "an evaluation under way when a run fails"),
    ("run.py", "mesh"): (1, "a script's own mesh"),
    ("producer.py", "swap"): (4, "swap = drain or abort"),
    ("stream.py", "_finish"): (2, "columns lost with a rank"),
    ("stream.py", "_unwanted"): (1, "keep"),
    ("synchronous.py", "greedy_baseline"): (4, "remax"),
    ("judge.py", "evaluate"): (1, "a script's own evaluation"),
    ("control.py", "obey"): (3, "a pause or a stop that somebody requests"),
    ("control.py", "_keep"): (1, "a checkpoint that somebody requests"),
    ("room.py", "with_room"): (3, "a lost machine"),
    ("replicas.py", "_bring_back"): (4, "a lost sampler"),
    ("replicas.py", "_return"): (5, "a lost sampler"),
    ("replicas.py", "again"): (2, "a lost sampler"),
    ("replicas.py", "outlive"): (1, "a lost sampler"),
    ("replicas.py", "abort"): (2, "swap = drain or abort"),
    ("replay.py", "begin"): (1, "run.replay"),
    ("replay.py", "load"): (3, "run.replay"),
    ("replay.py", "load_into"): (1, "run.replay"),
    ("replay.py", "load_alone"): (2, "run.replay"),
    ("replay.py", "_number"): (1, "run.replay"),
}
"""Awaits to which no run comes that is only killed: by file and function, how many, and what leads there."""


def awaits(path: Path) -> Iterator[tuple[str, range]]:
    """The lines of each await, and the function around it: also of what `async for` and `async with` await."""
    tree = ast.parse(path.read_text("utf-8"))
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Await):
                yield function.name, range(node.lineno, (node.end_lineno or node.lineno) + 1)
            elif isinstance(node, ast.AsyncFor | ast.AsyncWith):
                yield function.name, range(node.lineno, node.body[0].lineno)


def go_on(folder: Path, setting: Setting, whole: dict[str, object], after: str) -> None:
    """Begin again what has ended somehow; it ends well."""
    with capture_logs():
        simulate(lambda: setting.run(folder))
    check_kept(folder, setting)
    if not setting.ahead:
        assert outcome(folder, setting) == whole, after


@types.coroutine
def interrupted(main: Coroutine[object, object, None], at: int, stood: list[str]) -> Generator[object, object, None]:
    """The program, cancelled at one of its awaits as by Ctrl-C; `stood` gets where it waits, an await after another."""
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


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_that_is_killed_at_any_await_goes_on(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(setting.algorithm).path
    runs = tmp_path / "runs"
    runs.mkdir()
    points = KillPoints(runs, tmp_path / "copies", [path])
    with capture_logs():
        points.watch(lambda: setting.run(runs))
    check_kept(runs, setting)
    whole = outcome(runs, setting)

    killed = {line for file, line in points.lines if file == str(path)}
    assert not [lines for _, lines in awaits(path) if killed.isdisjoint(lines)], "an await at which nobody was killed"
    for left in points.remains:
        go_on(left.folder, setting, whole, f"killed after {left.after}")
    with capsys.disabled():
        print(  # noqa: T201 -- how much was tried
            f"\n{setting}: killed at {points.moments:,} moments, at {len(points.awaits)} awaits and "
            f"{len(killed)} lines of the script; gone on from {len(points.remains)} states of the disk"
        )


@pytest.mark.timeout(900)
def test_no_await_of_a_run_is_untested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of those behind the script's: at each of them a run was killed, in the first life or when it went on."""
    reached: set[tuple[str, int]] = set()
    moments = 0
    scripts = [script(name).path for name in ("grpo", "ppo")]
    for number, setting in enumerate(each for each in SETTINGS if each.meanwhile == (each.ahead == 1)):
        runs = tmp_path / f"{number}"
        runs.mkdir()
        for copies in (tmp_path / f"{number}-first", tmp_path / f"{number}-again"):
            points = KillPoints(runs, copies, [*scripts, *GONE_THROUGH])
            with capture_logs():
                points.watch(lambda: setting.run(runs))  # noqa: B023 -- called at once
            reached.update(points.lines)
            moments += points.moments
            half = [left.folder for left in points.remains if left.after == "half of write(run.json)"]
            if number or not half:
                break
            runs = half[-1]
    all_awaits = [(path, name, lines) for path in (*scripts, *GONE_THROUGH) for name, lines in awaits(path)]
    missed = Counter(
        (path.name, name) for path, name, lines in all_awaits if reached.isdisjoint((str(path), line) for line in lines)
    )
    assert missed == {place: count for place, (count, _) in NOT_REACHED.items()}
    with capsys.disabled():
        print(  # noqa: T201 -- how much was tried
            f"\n{len(all_awaits) - missed.total()} awaits of {len(scripts) + len(GONE_THROUGH)} files were killed, at "
            f"{moments:,} moments; none untested but {missed.total()} that these do not come to: "
            f"{'; '.join(dict.fromkeys(why for _, why in NOT_REACHED.values()))}"
        )


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.ahead != 1 and not each.meanwhile], ids=str)
def test_a_run_that_goes_on_and_is_killed_again_at_any_await_goes_on(setting: Setting, tmp_path: Path) -> None:
    path, runs, again = script(setting.algorithm).path, tmp_path / "runs", tmp_path / "again"
    runs.mkdir()
    first = KillPoints(runs, tmp_path / "first", [path])
    with capture_logs():
        first.watch(lambda: setting.run(runs))
    whole = outcome(runs, setting)
    half = [left.folder for left in first.remains if left.after == "half of write(run.json)"]
    shutil.copytree(half[1], again)  # one checkpoint is whole, the next is half-written
    points = KillPoints(again, tmp_path / "copies", [path])
    with capture_logs():
        points.watch(lambda: setting.run(again))
    for left in points.remains:
        go_on(left.folder, setting, whole, f"killed again after {left.after}")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_that_is_interrupted_at_any_await_goes_on(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(folder: Path, at: int, stood: list[str]) -> None:
        await interrupted(setting.run(folder), at, stood)

    awaits: list[str] = []
    with capture_logs():
        simulate(lambda: main(tmp_path / "whole", 0, awaits))
    whole = outcome(tmp_path / "whole", setting)
    for at in range(1, len(awaits) + 1):
        folder = tmp_path / str(at)
        with capture_logs(), suppress(asyncio.CancelledError):
            simulate(lambda: main(folder, at, []))  # noqa: B023 -- called at once
        go_on(folder, setting, whole, f"interrupted at await {at} of {len(awaits)}")
    with capsys.disabled():
        print(f"\n{setting}: interrupted at {len(awaits)} awaits")  # noqa: T201 -- as above
