"""A machine with little shared memory: what does not fit goes through files, and what fits nowhere is told in words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.mesh.shared_memory import FOLDER

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root of Linux can mount memory"),
]

SCRIPT = """
import asyncio, sys
from pathlib import Path
import numpy as np
from meshrl import Actor, Batch, Gather, Mesh, Resources, endpoint
from meshrl.errors import DataError, RankFailed
from meshrl.mesh import Same
from meshrl.engines import make_engine

MIB = 1 << 20

class Rows(Actor):
    @endpoint
    async def make(self, mib: int, value: float) -> Gather[Batch]:
        return Batch.of(rewards=np.full(mib * MIB // 4, value, np.float32))

    @endpoint
    async def total(self, batch: Batch) -> Same[float]:
        return float(batch.rewards.sum(dtype=np.float64))

async def main():
    engine = make_engine("processes", shared_memory_mib={mib})
    maker = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Rows)
    taker = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Rows)
    try:
        {steps}
    finally:
        await engine.close()

asyncio.run(main())
"""
MORE_THAN_THERE_IS = """
        batches = [await maker.make(16, float(value)) for value in range(10)]
        for value, batch in enumerate(batches):
            assert await taker.total(batch) == value * 4 * MIB
            assert (await batch.load()).rewards[-1] == value
        files = list(Path(sys.argv[1]).glob("files/meshrl-pool-*"))
        print(len(files), "files")
        print(sum(path.stat().st_size for path in Path("/dev/shm").iterdir()) >> 20, "MiB in memory")
"""
NO_ROOM_AT_ALL = """
        kept = [await maker.make(15, 1.0) for _ in range(4)]
        try:
            await maker.make(24, 2.0)
        except RankFailed as error:
            assert isinstance(error.__cause__, DataError)
            print(error.__cause__)
        try:
            await taker.total(Batch.of(rewards=np.zeros(12 * MIB, np.float32)))
        except DataError as error:
            print(error)
        assert await taker.total(kept[0]) == 15 * MIB // 4
        del kept
        assert (await (await maker.make(24, 2.0)).load()).rewards[0] == 2
        print("it goes on")
"""
MOUNTS = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
{}
exec "$2" "$1/script.py" "$1"
"""


def output(folder: Path, steps: str, mounts: str = "", mib: int | None = None) -> str:
    """What the script says where /dev/shm has 64 MiB, and the run a share of so many."""
    alone = ["unshare", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    (folder / "script.py").write_text(SCRIPT.replace("{steps}", steps.strip()).replace("{mib}", str(mib)))
    files = folder / "files"
    files.mkdir()
    command = [*alone, "sh", "-c", MOUNTS.format(mounts), "sh", str(folder), sys.executable]
    own = {**os.environ, "TMPDIR": str(files), "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "1000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_what_fits_nowhere_is_refused_with_the_numbers(tmp_path: Path) -> None:
    said = output(tmp_path, NO_ROOM_AT_ALL, 'mount -t tmpfs -o size=16m tmpfs "$1/files"')
    first, second = [line for line in said.splitlines() if "do not fit" in line]
    for line, asked, mine in ((first, 24, 60), (second, 48, 0)):
        assert int(line.split()[0]) >> 20 == asked
        assert f"{FOLDER} has 3 MiB left" in line
        assert f"{tmp_path}/files has 16 MiB left" in line
        assert f"{mine} MiB are this process's" in line
        assert "give /dev/shm more, as by `docker run --shm-size`" in line
    assert "it goes on\n" in said


def test_a_run_keeps_to_its_share(tmp_path: Path) -> None:
    said = output(tmp_path, MORE_THAN_THERE_IS, mib=40)
    assert "8 files" in said
    assert "32 MiB in memory" in said
    (warning,) = [line for line in said.splitlines() if "warning" in line]
    assert f"what ranks hand to each other goes through {tmp_path}/files" in warning
    assert not list((tmp_path / "files").iterdir())
    assert "32 MiB are this process's, 32 MiB of /dev/shm are this run's (run.shared_memory_mib = 40)" in warning


@pytest.mark.wide
def test_a_share_that_is_too_small_is_told_by_the_name_of_its_setting(tmp_path: Path) -> None:
    said = output(tmp_path, NO_ROOM_AT_ALL, 'mount -t tmpfs -o size=40m tmpfs "$1/files"', mib=40)
    first, _ = [line for line in said.splitlines() if "do not fit" in line]
    assert "30 MiB of /dev/shm are this run's (run.shared_memory_mib = 40); raise run.shared_memory_mib, or" in first
    assert "it goes on\n" in said
