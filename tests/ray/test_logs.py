"""Output of ranks on another node, whose reader dies."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError

from meshrl.engines.ray import logs
from meshrl.engines.ray.channel import RayChannel
from meshrl.engines.ray.logs import RankLogs, read_on
from meshrl.engines.remote import LogFolder, Place, Process
from tests.processes.conftest import until


class FakeReader:
    """Reads files of this machine. Raises `error` if there is one."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.read_on = self

    async def remote(self, files: Sequence[tuple[str, int]]) -> list[tuple[bytes, int]]:
        if self.error:
            raise self.error
        return read_on(files)


def rank(number: int, folder: Path) -> Process:
    """A process on another node, which writes to NUMBER.out."""
    (folder / f"{number}.out").touch()
    place = Place(number, "far", "10.0.0.2", "n1", 1, "another boot", files=[str(folder / f"{number}.out")])
    process = Process(f"{folder}-{number}", RayChannel(Mock()), place)
    process.log = LogFolder(folder / "main").of(number)
    return process


async def writes(process: Process, folder: Path, text: str) -> None:
    """Let a rank write, and wait until its log has it."""
    number = process.known.pid if process.known else 0
    with (folder / f"{number}.out").open("a") as file:
        file.write(text)
    await until(lambda: text in (folder / f"main-{number}.log").read_text())


async def test_a_new_rank_on_a_node_whose_reader_has_died_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[FakeReader] = []

    def make(_: str) -> FakeReader:
        readers.append(FakeReader())
        return readers[-1]

    monkeypatch.setattr(logs, "_reader", make)
    monkeypatch.setattr(logs, "_PAUSE", 0.01)
    monkeypatch.setattr("ray.kill", lambda _: None)
    followed, old, new = RankLogs(), rank(0, tmp_path), rank(1, tmp_path)
    followed.follow(old)
    await writes(old, tmp_path, "once")
    readers[0].error = RayActorError()
    await followed.last("n1")
    followed.follow(new)
    await writes(new, tmp_path, "new")
    await writes(old, tmp_path, "again")
    assert (tmp_path / "main-0.log").read_text().count("once") == 1
    await followed.close()
