"""The thread that writes what a run does now."""

from pathlib import Path

from meshrl.events import EventLog
from meshrl.run import NOW
from meshrl.run.watch import Watch


async def test_nothing_is_left_even_if_the_folder_is_moved_while_the_file_is_written(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    begun, folder = tmp_path / "begun", tmp_path / "run"
    begun.mkdir()
    watch = Watch(60, events, lambda: folder, lambda: None)
    (begun / f".{NOW}.part").write_bytes(b"half")
    begun.rename(folder)
    watch.stop()
    events.close()
    assert list(folder.iterdir()) == []
