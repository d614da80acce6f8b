"""A controller that is killed at any await goes on: each prompt is trained once or dropped, and the bound holds.

`grpo` and `ppo`, unchanged, on roles without a model in virtual time. Every moment of a run is noted at which a kill
could end it (`meshrl.testing.KillPoints`), and from each state of the disk that was there a run goes on to its end.
"""

import ast
import asyncio
import shutil
import types
from collections.abc import Coroutine, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from meshrl.testing import KillPoints, simulate
from tests.schedules.conftest import SETTINGS, Setting, check_kept, outcome, script


def awaits(path: Path) -> Iterator[range]:
    """The lines of each await of a script: also of what `async for` and `async with` await."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Await):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.AsyncFor | ast.AsyncWith):
            yield range(node.lineno, node.body[0].lineno)


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
    assert not [lines for lines in awaits(path) if killed.isdisjoint(lines)], "an await at which nobody was killed"
    for left in points.remains:
        go_on(left.folder, setting, whole, f"killed after {left.after}")
    with capsys.disabled():
        print(  # noqa: T201 -- how much was tried
            f"\n{setting}: killed at {points.moments:,} moments, at {len(points.awaits)} awaits and "
            f"{len(killed)} lines of the script; gone on from {len(points.remains)} states of the disk"
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
