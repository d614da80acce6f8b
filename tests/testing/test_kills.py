import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.kills import KillPoints

Watch = Callable[[Callable[[], Coroutine[object, object, None]]], tuple[KillPoints, list[str | None]]]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Watches a program, and returns what the file `notes` has at each moment."""
    (tmp_path / "here").mkdir()

    def watched(main: Callable[[], Coroutine[object, object, None]]) -> tuple[KillPoints, list[str | None]]:
        points = KillPoints(tmp_path / "here", tmp_path / f"copies-{main.__name__}", [Path(__file__)])
        points.watch(main)
        files = [left.folder / "notes" for left in points.remains]
        return points, [file.read_text("utf-8") if file.exists() else None for file in files]

    return watched


def test_a_write_in_place_is_seen_half_done_and_a_line_without_a_wait_is_a_moment(tmp_path: Path, watch: Watch) -> None:
    async def main() -> None:
        for text in ("one", "another"):
            await asyncio.sleep(1)
            (tmp_path / "here/notes").write_text(text, "utf-8")

    points, notes = watch(main)
    assert notes == [None, "", "o", "one", "ano", "another"]
    assert any("test_kills.py" in where for where in points.awaits)
    assert points.lines[__file__, main.__code__.co_firstlineno + 3] == 2


def test_what_is_renamed_is_seen_whole_and_what_a_thread_changes_is_no_moment(tmp_path: Path, watch: Watch) -> None:
    part, notes = tmp_path / "here/part", tmp_path / "here/notes"

    async def main() -> None:
        for text in ("one", "another"):
            await asyncio.to_thread(part.write_text, text, "utf-8")
            part.rename(notes)

    def write() -> None:
        part.write_text("a third", "utf-8")
        part.rename(notes)

    async def threaded() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write).result()

    points, texts = watch(main)
    assert dict.fromkeys(texts) == {None: None, "one": None, "another": None}
    assert [left.after for left in points.remains].count("rename(part, notes)") == 2
    alone, texts = watch(threaded)
    assert texts == ["another", "a third"]
    assert [left.after for left in alone.remains] == ["nothing", "nothing"]
