"""A disk of which each write and each sync fails once: a run ends in words, and goes on without loss."""

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import Metrics, Policy, PolicyConfig, Run, RunConfig
from meshrl.errors import ConfigError, DataError, MeshrlError
from meshrl.run.config import MeshConfig
from meshrl.testing import FaultyFiles
from meshrl.testing.faulty_files import Fault

STEPS = 3


async def train(folder: Path) -> None:
    """A run of three steps with a checkpoint after each, that is gone on with."""
    table = {"name": "mine", "folder": str(folder), "resume": True, "checkpoint_every": 1}
    with capture_logs():
        async with Run(RunConfig(**table, meshes={"main": MeshConfig(cpus=0)})) as run:  # type: ignore[arg-type]
            await run.spawn(Policy, PolicyConfig(backend="fake", model="none"))
            async for step in run.steps(STEPS):
                await run.record(Metrics.of(loss=(float(step), 1.0)))


async def operations(folder: Path) -> int:
    with FaultyFiles(folder).installed() as disk:
        await train(folder)
    return disk.operations


def losses(folder: Path) -> list[float]:
    lines = (folder / "mine/metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line)["loss"] for line in lines]


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
async def test_a_run_ends_in_words_and_goes_on_without_loss(tmp_path: Path, fault: Fault) -> None:
    count = await operations(tmp_path / "whole")
    assert count > 4 * STEPS
    for at in range(count):
        folder = tmp_path / str(at)
        # Not every fault ends the run: what says that it could not be written may be a line of the log.
        with FaultyFiles(folder, at, fault).installed() as disk, suppress(OSError, MeshrlError):
            await train(folder)
        assert disk.operations > at
        await train(folder)
        assert losses(folder) == [0, 1, 2], f"operation {at}"


async def test_a_write_that_is_short_is_gone_on_with(tmp_path: Path) -> None:
    count = await operations(tmp_path / "whole")
    for at in range(count):
        folder = tmp_path / str(at)
        with FaultyFiles(folder, at, "short").installed():
            await train(folder)
        assert losses(folder) == [0, 1, 2], f"operation {at}"


@pytest.mark.parametrize(("fault", "what"), [("ENOSPC", "the disk is full"), ("EIO", "the disk failed")])
async def test_the_error_says_what_the_disk_did_and_what_is_left(tmp_path: Path, fault: Fault, what: str) -> None:
    count, told = await operations(tmp_path / "whole"), list[str]()
    for at in range(count):
        folder = tmp_path / str(at)
        with FaultyFiles(folder, at, fault).installed():
            try:
                await train(folder)
            except DataError as error:
                whole = sorted(path.name for path in (folder / "mine/checkpoints").glob("step-*"))
                told.append(str(error))
                if whole and what in told[-1]:
                    assert f"the newest whole checkpoint is {whole[-1]}, and run.resume=true" in told[-1]
    assert len(told) > STEPS
    assert all(what in each or "the end of the run could not be written" in each for each in told)
    assert any("step-000002" in each for each in told)


async def test_a_folder_that_may_not_be_written_is_told_of(tmp_path: Path) -> None:
    with FaultyFiles(tmp_path, 0, "EROFS").installed(), pytest.raises(DataError, match="Read-only file system"):
        await train(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"file/.mine.lock cannot be written: .*Set run.folder to a place where you may"
    ):
        await train(tmp_path / "file")
