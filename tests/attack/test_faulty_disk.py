"""A disk of which each write and each sync fails once: a run ends in words, and goes on without loss."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from meshrl import Metrics, Run, RunConfig
from meshrl.errors import ConfigError, DataError, MeshrlError
from tests.run.test_checkpoints import counting, lines, run
from tests.support.faulty_files import Fault, FaultyFiles

STEPS = 3


async def train(folder: Path) -> None:
    await run(counting(STEPS), folder, checkpoint_every=1)


def groups(folder: Path) -> list[float]:
    return [line["group"] for line in lines(folder / "mine/metrics.jsonl")]


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.wide)])
async def test_a_run_ends_in_words_and_goes_on_without_loss(tmp_path: Path, every: int) -> None:
    """The error says what the disk did and what is left. Not every fault ends the run: it may be a line of the log."""
    with FaultyFiles(tmp_path / "whole").installed() as whole:
        await train(tmp_path / "whole")
    assert whole.operations > 4 * STEPS
    told: list[str] = []
    happened: set[Fault] = set()
    faults: dict[Fault, str] = {"EIO": "the disk failed", "ENOSPC": "the disk is full", "short": ""}
    for first, (fault, what) in enumerate(faults.items()):
        for at in range(first % every, whole.operations, every):
            folder = tmp_path / f"{fault}-{at}"
            with FaultyFiles(folder, at, fault).installed() as disk:
                try:
                    await train(folder)
                except DataError as error:
                    assert fault != "short"
                    written = sorted(path.name for path in (folder / "mine/checkpoints").glob("step-*"))
                    told.append(str(error))
                    assert what in told[-1] or "the end of the run could not be written" in told[-1]
                    if written and what in told[-1]:
                        assert f"the newest whole checkpoint is {written[-1]}, and run.resume=true" in told[-1]
                except (OSError, MeshrlError):
                    assert fault != "short"
            if disk.has_failed:
                happened.add(fault)
            if fault != "short":
                await train(folder)
            assert groups(folder) == [0, 2, 4], f"{fault} at operation {at}"
    assert happened == set(faults)
    assert len(told) > STEPS
    assert any("step-000002" in each for each in told)


async def test_what_ended_a_run_is_raised_though_its_end_cannot_be_written(tmp_path: Path) -> None:
    async def failing(folder: Path, disk: FaultyFiles, count: int) -> None:
        async with Run(RunConfig(folder=str(folder))) as run:
            await run.record(Metrics.of(loss=(1.0, 1.0)))
            disk.fail_after(count)
            raise ValueError("of the script")

    told = list[bool]()
    for count in range(100):
        disk = FaultyFiles(tmp_path / str(count), fault="ENOSPC")
        with capture_logs() as logs, disk.installed(), pytest.raises(ValueError, match="of the script"):
            await failing(tmp_path / str(count), disk, count)
        told.append(any("could not be written" in each["event"] for each in logs))
        async with Run(RunConfig(folder=str(tmp_path / str(count)), resume=True)):  # it is nobody's any more
            pass
        if not disk.has_failed:
            break  # the run has ended before
    assert not told[-1]
    assert any(told)


async def test_a_folder_that_may_not_be_written_is_told_of(tmp_path: Path) -> None:
    with FaultyFiles(tmp_path, 0, "EROFS").installed(), pytest.raises(DataError, match="Read-only file system"):
        await train(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"file/.mine.lock cannot be written: .*Set run.folder to a place where you may"
    ):
        await train(tmp_path / "file")
