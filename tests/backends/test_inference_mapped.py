"""Shared memory that the engine's process keeps mapped."""

from pathlib import Path

import meshrl_inference.mapped
from meshrl_inference.mapped import mapped


def test_a_file_that_is_written_again_under_another_name_is_mapped_once(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_bytes(b"old bytes")
    memory = mapped(str(file))
    assert memory[:] == b"old bytes"
    file = file.rename(tmp_path / "other")
    with file.open("r+b") as opened:
        opened.write(b"new bytes")
    assert mapped(str(file)) is memory
    assert memory[:] == b"new bytes"


def test_memory_that_its_writer_removed_is_let_go(tmp_path: Path) -> None:
    before = set(meshrl_inference.mapped._kept)
    for name in ("one", "two", "three"):
        file = tmp_path / name
        file.write_bytes(b"bytes")
        mapped(str(file))
        file.unlink()
    assert len(set(meshrl_inference.mapped._kept) - before) == 1
