"""Memory that processes share: leased while it is read, written anew when nobody reads it."""

import fcntl
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.errors import DataError
from meshrl.mesh import Segment, sweep
from meshrl.mesh.shared_memory import FOLDER, Pool

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine shares no memory between processes")

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def written(pool: Pool, value: int, nbytes: int = MIB) -> Segment:
    writing = pool.write(nbytes)
    assert writing is not None
    writing.memory[:] = value
    return writing.done()


def sweep_elsewhere() -> None:
    subprocess.run([sys.executable, "-c", "from meshrl.mesh.shared_memory import sweep; sweep()"], check=True)


def test_what_is_read_is_not_written_anew(pool: Pool) -> None:
    one = written(pool, 1)
    two = written(pool, 2)
    assert one.path != two.path
    assert (one.memory == 1).all()
    assert (two.memory == 2).all()
    with pytest.raises(ValueError, match="read-only"):
        one.memory[0] = 3


def test_what_nobody_reads_is_used_again_and_cannot_be_found_any_more(pool: Pool) -> None:
    one = written(pool, 1)
    path, place = one.path, Path(one.path).stat().st_ino
    view = one.memory[:10]
    del one
    gc.collect()
    assert Path(written(pool, 2).path).stat().st_ino != place  # a view is a lease too
    del view
    gc.collect()
    again = written(pool, 3)
    assert Path(again.path).stat().st_ino == place
    assert (again.memory == 3).all()
    with pytest.raises(DataError, match=r"1048576 bytes in this machine's shared memory are gone"):
        Segment(path, MIB)


def test_another_process_reads_it_and_its_lease_ends_with_it(pool: Pool) -> None:
    one = written(pool, 7)
    path = one.path
    script = (
        "import sys; from meshrl.mesh.shared_memory import Segment\n"
        f"segment = Segment({path!r}, {MIB}); print(int(segment.memory.sum()), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == 7 * MIB
        del one
        gc.collect()
        assert written(pool, 8).path != path
        assert Segment(path, MIB).memory[0] == 7
        reader.kill()
    gc.collect()
    written(pool, 9)
    with pytest.raises(DataError, match="gone"):
        Segment(path, MIB)


def test_what_a_killed_process_left_is_swept(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.mesh.shared_memory.FOLDER", tmp_path)  # where no process of another test sweeps
    kept = written(pool, 1)
    script = (
        "import os, signal; from pathlib import Path; from meshrl.mesh import shared_memory\n"
        f"shared_memory.FOLDER = Path({str(tmp_path)!r})\n"
        f"writing = shared_memory.pool.write({MIB}); print(writing.done().path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout.strip()
    assert Path(left).exists()
    sweep()
    assert not Path(left).exists()
    assert Path(kept.path).exists()


def test_what_lives_is_not_swept_after_it_was_looked_at_while_it_was_read(pool: Pool) -> None:
    one = written(pool, 1)
    two = written(pool, 2)  # which looked whether the first may be written anew
    path = one.path
    del one
    gc.collect()
    sweep_elsewhere()
    assert Path(path).exists()
    assert Path(written(pool, 3).path).exists()
    assert (two.memory == 2).all()


def test_what_was_swept_is_not_used_again(pool: Pool) -> None:
    one = written(pool, 1)
    Path(one.path).unlink()
    del one
    gc.collect()
    assert (written(pool, 2).memory == 2).all()


def test_what_nobody_reads_is_given_back_where_there_is_no_room(pool: Pool) -> None:
    kept, *others = [written(pool, value) for value in range(4)]
    Path(others[0].path).unlink()  # by a sweeper
    del others
    gc.collect()
    assert pool.write(1 << 60) is None
    assert [own.path for own in pool._segments] == [Path(kept.path)]


def test_who_comes_while_it_is_written_anew_finds_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(pool, 1).path
    gc.collect()
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        """The owner writes it anew between the reader's opening and his lease."""
        monkeypatch.undo()
        written(pool, 2)
        gc.collect()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="gone"):
        Segment(path, MIB)


def test_what_was_begun_and_given_up_is_used_again(pool: Pool) -> None:
    writing = pool.write(MIB)
    assert writing is not None
    number = writing.memory.__array_interface__["data"]
    del writing
    again = pool.write(MIB)
    assert again is not None
    assert again.memory.__array_interface__["data"] == number


def test_a_fork_leaves_the_memory_to_its_parent() -> None:
    script = (
        "import os; from meshrl.mesh.shared_memory import pool\n"
        f"path = pool.write({MIB}).done().path\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0); print(os.path.exists(path))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_machine_without_room_says_none(pool: Pool) -> None:
    assert pool.write(1 << 60) is None
    assert pool.write(0) is None


def test_a_link_to_a_file_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.mesh.shared_memory.FOLDER", tmp_path)
    precious, link = tmp_path / "precious", tmp_path / f"meshrl-pool-{'0' * 8}-{'0' * 16}"
    precious.write_text("all of it", "utf-8")
    link.symlink_to(precious)
    sweep()
    assert precious.read_text("utf-8") == "all of it"
