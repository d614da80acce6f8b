import asyncio
import errno
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import LocalEngine, Metrics, Run, RunConfig
from meshrl.errors import ConfigError, DataError
from meshrl.observe import NOW
from meshrl.run.lock import FolderLock

HOLDS = """
import asyncio, sys
from meshrl import Metrics, Run, RunConfig
from meshrl.run import lock

lock._LEASE = 1.0  # so it shows often that it lives

async def main():
    async with Run(RunConfig(name="mine", folder=sys.argv[1], resume=True, log=[])) as run:
        async for step in run.steps(2):
            await run.record(Metrics.of(loss=(1.0, 1.0)))
            print("step", step, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        (run.folder / "model").write_text("mine")

asyncio.run(main())
"""


@contextmanager
def holder(folder: Path) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "step 0":
            assert process.poll() is None
        yield process
        process.kill()


def config(folder: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate({"name": "mine", "folder": str(folder), **changes})


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and NOW not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def no_locks(descriptor: int, _: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def be_elsewhere(monkeypatch: pytest.MonkeyPatch, lease: float = 30.0) -> None:
    monkeypatch.setattr("meshrl.run.lock.boot_id", lambda: "another")
    monkeypatch.setattr("meshrl.run.lock._lock", lambda _: True)
    monkeypatch.setattr("meshrl.run.lock._LEASE", lease)


def test_a_second_run_of_a_name_is_refused_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(resume: bool = True) -> str:
        told = rf"mine is being written by process {process.pid} on "
        with capture_logs() as logged, pytest.raises(ConfigError, match=told):
            Run(config(tmp_path, resume=resume))
        return logged[0]["event"] if logged else ""

    with holder(tmp_path) as process:
        before = files(tmp_path)
        assert [refused(), refused(resume=False)] == ["", ""]
        with monkeypatch.context() as patch:
            patch.setattr("fcntl.flock", no_locks)
            refused()
        be_elsewhere(monkeypatch)
        assert "has not released it: watching for 30 s whether it still runs" in refused()
        assert files(tmp_path) == before
        process.communicate("\n\n")
        assert process.returncode == 0
    assert (tmp_path / "mine/metrics.jsonl").read_bytes().count(b"\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_system_without_locks_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", no_locks)
    lock = FolderLock(tmp_path / "mine")
    lock.check()
    lock.release()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_killed_run_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool) -> None:
    if elsewhere:
        be_elsewhere(monkeypatch, lease=0.5)
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with capture_logs() as logged:
        async with Run(config(tmp_path, resume=True)) as run:
            await run.record(Metrics.of(loss=(1.0, 1.0)))
    assert elsewhere == (f"process {process.pid} on " in logged[0]["event"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_that_does_not_open_holds_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DataError):
            Run(config(tmp_path, replay=str(tmp_path / "nothing.jsonl")))
    assert not list(tmp_path.iterdir())


async def test_a_run_stopped_beyond_its_lease_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_elsewhere(monkeypatch, lease=0.5)
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with capture_logs():
            async with Run(config(tmp_path, resume=True, log=[])) as run:
                await run.record(Metrics.of(loss=(2.0, 1.0)))
                before = files(tmp_path / "mine")
                process.send_signal(signal.SIGCONT)
                process.communicate("\n\n")
                assert process.returncode == 1
                assert files(tmp_path / "mine") == before
                await run.record(Metrics.of(loss=(3.0, 1.0)))
    assert (tmp_path / "mine/metrics.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("what", ["taken", "moved", "replaced"])
async def test_a_run_that_has_lost_its_folder_writes_no_more(tmp_path: Path, what: str) -> None:
    lock, kept = tmp_path / ".mine.lock", tmp_path / ("mine" if what == "taken" else "elsewhere")

    async def train() -> None:
        async with Run(config(tmp_path)) as run:
            await run.record(Metrics.of(loss=(1.0, 1.0)))
            if what == "taken":
                owner = msgspec.json.decode(lock.read_bytes(), type=dict[str, object])
                lock.write_bytes(msgspec.json.encode({**owner, "host": "elsewhere", "pid": 7, "token": "token"}))
            else:
                (tmp_path / "mine").rename(kept)
            if what == "replaced":
                (tmp_path / "mine").mkdir()
            await run.record(Metrics.of(loss=(2.0, 1.0)))

    told = "taken over by process 7 on elsewhere: this run no longer writes"
    with pytest.raises(DataError, match=rf"mine was {told if what == 'taken' else 'moved, removed or replaced'}"):
        await train()
    assert (kept / "metrics.jsonl").read_bytes().count(b"\n") == 1
    assert what == "taken" or not list((tmp_path / "mine").glob("*"))
    assert what != "taken" or b"elsewhere" in lock.read_bytes()
    assert not (tmp_path / "mine/summary.json").exists()


async def test_of_many_that_open_a_folder_at_once_one_does(tmp_path: Path) -> None:
    made = config(tmp_path, resume=True)

    def attempt() -> Run | None:
        with suppress(ConfigError):
            return Run(made, engine=LocalEngine())
        return None

    opened = await asyncio.gather(*(asyncio.to_thread(attempt) for _ in range(40)))
    (alone,) = [run for run in opened if run]
    async with alone:
        pass
