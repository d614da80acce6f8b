"""Memory that processes share: leased while it is read, written anew when nobody reads it."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.errors import DataError
from meshrl.shared_memory import FOLDER, Pool, Segment, sweep

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
        "import sys; from meshrl.shared_memory import Segment\n"
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


def test_what_a_killed_process_left_is_swept(pool: Pool) -> None:
    kept = written(pool, 1)
    script = (
        "import os, signal; from meshrl.shared_memory import pool\n"
        f"writing = pool.write({MIB}); print(writing.done().path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout.strip()
    assert Path(left).exists()
    sweep()
    assert not Path(left).exists()
    assert Path(kept.path).exists()


def test_a_machine_without_room_says_none(pool: Pool) -> None:
    assert pool.write(1 << 60) is None
    assert pool.write(0) is None
