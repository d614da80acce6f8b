"""The moments at which a program can be killed, and what its disk holds then."""

import asyncio
import threading
from pathlib import Path

import pytest

from meshrl.testing import KillPoints


@pytest.fixture
def points(tmp_path: Path) -> KillPoints:
    (tmp_path / "here").mkdir()
    return KillPoints(tmp_path / "here", tmp_path / "copies")


def contents(points: KillPoints, name: str) -> list[str | None]:
    files = [left.folder / name for left in points.remains]
    return [file.read_text("utf-8") if file.exists() else None for file in files]


def test_what_is_written_in_place_is_seen_half_written(tmp_path: Path, points: KillPoints) -> None:
    async def main() -> None:
        for text in ("one", "another"):
            await asyncio.sleep(1)
            (tmp_path / "here/notes").write_text(text, "utf-8")

    points.watch(main)
    assert contents(points, "notes") == [None, "", "o", "one", "ano", "another"]
    assert any("test_kills.py" in where for where in points.awaits)


def test_what_is_renamed_is_seen_whole_and_what_a_thread_of_its_own_changes_is_no_moment(
    tmp_path: Path, points: KillPoints
) -> None:
    part, notes = tmp_path / "here/part", tmp_path / "here/notes"

    async def main() -> None:
        for text in ("one", "another"):
            await asyncio.to_thread(part.write_text, text, "utf-8")
            part.rename(notes)

    def write() -> None:
        part.write_text("a third", "utf-8")
        part.rename(notes)

    async def threaded() -> None:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    points.watch(main)
    assert dict.fromkeys(contents(points, "notes")) == {None: None, "one": None, "another": None}
    assert [left.after for left in points.remains].count("rename(part, notes)") == 2
    alone = KillPoints(tmp_path / "here", tmp_path / "others")
    alone.watch(threaded)
    assert contents(alone, "notes") == ["another", "a third"]
    assert [left.after for left in alone.remains] == ["nothing", "nothing"]


def test_a_line_that_does_not_wait_is_a_moment(tmp_path: Path) -> None:
    async def nothing() -> None:
        pass

    async def main() -> None:
        await nothing()

    here = Path(__file__)
    points = KillPoints(tmp_path, tmp_path.with_name("copies"), [here])
    points.watch(main)
    assert points.lines[str(here), main.__code__.co_firstlineno + 1] == 1
    assert len(points.remains) == 1
