import fcntl
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.errors import DataError
from meshrl.mesh import Segment, Share, sweep
from meshrl.mesh.shared_memory import FOLDER, Pool

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine shares no memory between processes")

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Empty. Collections pass over what is there before."""
    gc.freeze()
    made = Pool()
    made.share = Share.of_run(None)
    yield made
    made.close()
    gc.unfreeze()


def written(pool: Pool, value: int, nbytes: int = MIB) -> Segment:
    writing = pool.write(nbytes)
    assert writing is not None
    writing.memory[:] = value
    return writing.done()


def test_what_a_killed_process_left_is_swept_and_nothing_else(pool: Pool) -> None:
    script = (
        "import os, signal; from meshrl.mesh.shared_memory import pool\n"
        f"path = pool.write({MIB}).done().path; print(path if os.path.exists(path) else None, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    one = written(pool, 1)
    two = written(pool, 2)  # which looked whether the first may be written anew, while it was read
    path = one.path
    del one
    gc.collect()
    assert left.parent == FOLDER
    sweep()
    assert not left.exists()
    assert Path(path).exists()
    assert Path(written(pool, 3).path).exists()
    assert (two.memory == 2).all()


def test_a_link_to_a_file_is_not_counted_and_not_swept(tmp_path: Path) -> None:
    share = Share.of_run(None)
    precious, link = tmp_path / "precious", share.new_path(FOLDER)
    precious.write_text("all of it", "utf-8")
    link.symlink_to(precious)
    assert share.taken() == 0
    sweep()
    link.unlink(missing_ok=True)
    assert precious.read_text("utf-8") == "all of it"


def test_what_nobody_reads_is_given_back_where_there_is_no_room(pool: Pool) -> None:
    kept, *others = [written(pool, value) for value in range(4)]
    Path(others[0].path).unlink()  # by a sweeper
    del others
    gc.collect()
    assert pool.share.taken() == 3 * MIB
    assert pool.write(1 << 60) is None
    assert pool.share.taken() == MIB
    assert (kept.memory == 0).all()
    assert pool.write(0) is None
    path = Path(kept.path)
    path.unlink()  # it, too, is not used again
    del kept
    gc.collect()
    assert (written(pool, 2).memory == 2).all()
    assert not path.exists()


def test_what_was_begun_and_given_up_is_used_again(pool: Pool) -> None:
    assert all(pool.write(MIB) for _ in range(2))
    assert pool.share.taken() == MIB


def test_who_comes_while_it_is_written_anew_finds_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(pool, 1).path
    gc.collect()
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        monkeypatch.undo()
        written(pool, 2)
        gc.collect()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="1048576 bytes in this machine's shared memory are gone"):
        Segment(path, MIB)
