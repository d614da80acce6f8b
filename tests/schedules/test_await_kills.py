"""A controller that is killed at any await goes on: each prompt is trained once or dropped, and the bound holds.

`grpo` and `ppo`, unchanged, on roles without a model in virtual time. Every moment of a run is noted at which a kill
could end it (`tests/support/kills.py`), and from states of the disk that were there a run goes on to its end: here
from some, spread over the run, and in `make test-all` from each.
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

from meshrl.testing import simulate
from tests.algorithms.pages import script
from tests.schedules.conftest import SOME_OR_ALL, Setting, check_kept, disturbed, outcome, some_or_all, spread
from tests.support.kills import KillPoints


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


@some_or_all(
    [Setting("ppo", 0, False)], 10, all=[Setting(name, ahead, False) for name in ("grpo", "ppo") for ahead in (0, 3)]
)
def test_a_run_killed_twice_at_any_await_goes_on(settings: list[Setting], most: int | None, tmp_path: Path) -> None:
    for number, setting in enumerate(settings):
        runs, again = tmp_path / f"{number}", tmp_path / f"{number}-again"
        runs.mkdir()
        first = watched(setting, runs)
        whole = outcome(runs, setting)
        half = [left.folder for left in first.remains if left.after == "half of write(run.json)"]
        shutil.copytree(half[1], again)  # a checkpoint is whole there, and the next is not
        remains = watched(setting, again).remains
        for at in spread(len(remains), most):
            go_on(remains[at].folder, setting, whole, f"killed again after {remains[at].after}")


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
