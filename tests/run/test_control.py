import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl.data import Metrics
from meshrl.events import Pending, waiting
from meshrl.observe import NOW, PAUSED, Command, RunStatus, ask
from meshrl.observe.run_files import open_requests
from meshrl.run import Run, RunConfig

Act = Callable[[Run], Awaitable[None]]


def play(folder: Path, act: Act, every: int | None = None, *, resume: bool = False) -> Path:
    async def script() -> None:
        config = RunConfig(name="mine", folder=str(folder), checkpoint_every=every, resume=resume)
        async with Run(config) as run:
            async for step in run.steps(4):
                await run.record(Metrics.of(loss=(1.0, 1.0)))
                if step == 1:
                    await act(run)

    asyncio.run(script())
    return folder / "mine"


async def until(holds: Callable[[], bool]) -> None:
    while True:
        if holds():
            return
        await asyncio.sleep(0.01)


def asking(*commands: Command) -> Act:
    async def act(run: Run) -> None:
        for command in commands:
            ask(run.folder, command)

    return act


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*"))


@pytest.mark.parametrize("every", [4, 2, None])
def test_a_checkpoint_that_is_asked_for_is_written_once(tmp_path: Path, every: int | None) -> None:
    run = play(tmp_path, asking("checkpoint"), every)
    assert checkpoints(run) == (["step-000002", "step-000004"] if every else [])
    assert open_requests(run) == []


def test_what_cannot_be_removed_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "control":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    async def act(run: Run) -> None:
        ask(run.folder, "checkpoint")
        monkeypatch.setattr(Path, "unlink", refuse)

    with capture_logs() as told:
        run = play(tmp_path, act, 100)
    monkeypatch.undo()
    assert checkpoints(run) == ["step-000002", "step-000004"]
    assert [each["event"].rpartition(" (")[0] for each in told if each["log_level"] == "warning"] == [
        f"{run}/control/checkpoint was carried out but cannot be removed"
    ]


def test_a_control_folder_that_is_a_link_stops_the_run_and_stays(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        (tmp_path / "elsewhere").mkdir()
        (run.folder / "control").symlink_to(tmp_path / "elsewhere")
        ask(run.folder, "stop")

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, act)
    assert open_requests(tmp_path / "mine") == ["stop"]
    run = play(tmp_path, asking(), every=100)  # it is not stopped again by what is left
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") == 4


def test_a_run_that_is_stopped_has_ended_as_by_an_interrupt_and_goes_on_from_there(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, asking("pause", "stop"), every=100)
    run = tmp_path / "mine"
    summary = msgspec.json.decode((run / "summary.json").read_bytes(), type=dict[str, object])
    assert (summary["status"], summary["steps"], checkpoints(run)) == ("interrupted", 2, ["step-000002"])
    ask(run, "stop")  # of the part that has ended: what comes is not stopped by it
    play(tmp_path, asking(), every=100, resume=True)
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") == 4


def test_a_run_that_is_paused_waits_until_it_is_told_to_go_on(tmp_path: Path) -> None:
    steps: list[int] = []

    async def pause(run: Run) -> None:
        async def go_on() -> None:
            await until(lambda: any(each.what == PAUSED for each in Pending.table.values()))
            ask(run.folder, "checkpoint")
            await until(lambda: open_requests(run.folder) == ["pause"])
            steps.append((run.folder / "metrics.jsonl").read_bytes().count(b"\n"))
            ask(run.folder, "resume")

        ask(run.folder, "pause")
        going = asyncio.create_task(go_on())
        going.add_done_callback(lambda done: done.result())

    run = play(tmp_path, pause, every=100)
    assert (steps, checkpoints(run)) == ([2], ["step-000002", "step-000004"])


def test_a_run_says_who_waits_now_and_nothing_when_it_has_ended(tmp_path: Path) -> None:
    found: list[RunStatus] = []

    def has_waits(file: Path) -> bool:
        found[:] = [msgspec.json.decode(file.read_bytes(), type=RunStatus)] if file.exists() else []
        return any(now.waits for now in found)

    async def wait(run: Run) -> None:
        said = iter(["nothing is ready"])  # it raises StopIteration from the first look on
        with (
            waiting("the judge", "a verdict", lambda: "3 of 4 are there"),
            waiting("the trainer", "a batch", lambda: next(said)),
        ):
            await until(lambda: has_waits(run.folder / NOW))  # a look before may still write the file

    run = play(tmp_path, wait)
    (now,) = found
    assert [(each.who, each.what, each.on) for each in now.waits] == [
        ("the judge", "a verdict", "3 of 4 are there"),
        ("the trainer", "a batch", "nothing is ready"),
    ]
    assert not (run / NOW).exists()
