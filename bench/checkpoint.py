"""A run's checkpoint and its resume in MB/s, against a raw write and read of the same bytes in as many files.

    python bench/checkpoint.py --json F [--rounds N] [--mib 2048]

A policy after one step: float32 weights and both of AdamW's moments. The checkpoint is what a run writes at its end,
and the resume what it reads: both with the controller's part. A rank has one thread. In the background, a run writes
from a copy of the state. The raw contestant has as many files of the same sizes, one thread for each, warm memory,
fsync, and Python's `write` and `readinto`. With several ranks, which are processes with one core each, its threads are
pinned to one core each, too. Files are written anew each time. They are read from the disk, as after a crash: both
contestants drop them from the page cache before, twice, and the second read counts, because the first after a write
takes up to three times as long on a virtual machine. Then a restore is read from the page cache, too. Contestants take
turns, after two rounds of warm-up. A checkpoint and a resume should reach .85 of the raw speed.

torch, 1 rank       a thread of this process
fsdp, 1 rank        the same
fsdp, 2 ranks       two processes, each with its own file

About 8 minutes.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.harness import Figure, arguments, at_least, figure, median, report, with_allocator
from meshrl import Batch, CrossEntropy, NewModel, PolicyConfig, Run, RunConfig
from meshrl.engines.local import RankLoop
from meshrl.roles import Policy
from meshrl.run import MeshConfig
from meshrl.run.checkpoints import Checkpoints, Saved
from meshrl.tasks import CursorState

LAYERS: Final = 4
WARM_UP: Final = 2
ROWS: Final = {"prompt": ["abc>", "fgh>", "b>", "ca>"], "completion": ["cba", "hgf", "b", "ac"]}


@dataclass(frozen=True)
class Subject:
    """A backend and its ranks."""

    backend: str
    ranks: int

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.backend}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


SUBJECTS: Final = (Subject("torch", 1), Subject("fsdp", 1), Subject("fsdp", 2))


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--mib", type=int, default=2048, help="about how large a checkpoint is (default: 2048)")
    parser.add_argument("--only", default="", help="only subjects with this in their name")
    options = parser.parse_args()
    with_allocator()
    figures: list[Figure] = []
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        for subject in (each for each in SUBJECTS if options.only in each.name):
            figures += runner.run(compare(subject, options.mib, options.rounds))
    report("checkpoint", figures, options.json)


async def compare(subject: Subject, mib: int, rounds: int) -> list[Figure]:
    """Let both take turns, and compare their medians."""
    seconds: dict[str, list[tuple[float, ...]]] = {"meshrl": [], "raw": []}
    with tempfile.TemporaryDirectory() as folder:
        meshes = {"train": MeshConfig(ranks=subject.ranks, cpus=1)}
        engine = "processes" if subject.ranks > 1 else "local"
        async with Run(RunConfig(folder=folder, name="run", engine=engine, meshes=meshes)) as run:
            config = PolicyConfig(backend=subject.backend, model=model(mib), mesh="train")
            policy = await run.spawn(Policy, config)
            await policy.update(await policy.encode(Batch.of(**ROWS)), CrossEntropy())
            here = Path(folder, "kept")
            await turn_of(policy, here)
            raw = Raw(sizes(here), Path(folder, "raw"), pinned=subject.ranks > 1)
            for number in range(rounds + WARM_UP):
                for turn in sorted(seconds, reverse=number % 2 == 0):
                    seconds[turn].append(raw.turn() if turn == "raw" else await turn_of(policy, here))
    own, peer = (
        [raw.nbytes / 1e6 / median(times) for times in zip(*turns[WARM_UP:], strict=True)] for turns in seconds.values()
    )
    label = f"{subject.name}, {raw.nbytes / 1e6:,.0f} MB"
    return [
        at_least(f"checkpoint, {label}", own[0], "MB/s", peer[0], 0.85),
        at_least(f"resume, {label}", own[1], "MB/s", peer[1], 0.85),
        figure(f"restore from the page cache, {label}", own[2], "MB/s", peer[2]),
        figure(f"checkpoint from a copy, {label}", own[3], "MB/s", peer[0]),
    ]


def model(mib: int) -> NewModel:
    """A model whose state has about `mib` MiB, in a few layers as wide as those of real models."""
    width = round((mib * 2**20 / (3 * 4 * LAYERS * 12)) ** 0.5 / 64) * 64  # 4 w^2 + 3 w (8/3 w) weights per layer
    return NewModel(
        characters="abcdefgh>",
        hidden_size=width,
        ffn_size=width * 8 // 3,
        layers=LAYERS,
        heads=width // 64,
        max_tokens=48,
    )


def tensors(folder: Path) -> list[Path]:
    """The files with nearly all bytes of a checkpoint."""
    return sorted(folder.rglob("*.safetensors"))


def sizes(folder: Path) -> list[int]:
    """Size of each of these in bytes."""
    return [file.stat().st_size for file in tensors(folder)]


async def turn_of(policy: Policy, run: Path) -> tuple[float, ...]:
    """Seconds to write a checkpoint, to resume from it, to restore it once more, and to write it from a copy."""
    written = await time_to_write(policy, run, wait=True)
    resumed = 0.0
    for _ in range(2):
        drop(tensors(run))
        began = time.perf_counter()
        kept = Checkpoints(run, 1, resume=True)
        await kept.adopt(kept.place("Policy"), policy)
        resumed = time.perf_counter() - began
    began = time.perf_counter()
    await policy.restore(str(tensors(run)[0].parent))
    return written, resumed, time.perf_counter() - began, await time_to_write(policy, run, wait=False)


async def time_to_write(policy: Policy, run: Path, wait: bool) -> float:
    """Seconds to write a run's first checkpoint."""
    shutil.rmtree(run, ignore_errors=True)
    kept = Checkpoints(run, 1, resume=False)
    await kept.adopt(kept.place("Policy"), policy)
    began = time.perf_counter()
    await kept.write(Saved(0, 1, 1, {}, {}, CursorState((), (), ()), {}), wait=wait)
    await kept.settle()
    return time.perf_counter() - began


def drop(files: Iterable[Path]) -> None:
    """Drop files, which are on the disk, from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Raw:
    """The raw contestant."""

    def __init__(self, sizes: Sequence[int], folder: Path, *, pinned: bool) -> None:
        """`pinned`: each file's thread has one core, as a rank's process has."""
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [{core} for core in cores[: len(sizes)]] if pinned else [set(cores) for _ in sizes]
        self.nbytes = sum(sizes)
        self._buffers: list[NDArray[np.uint8]] = [np.ones(size, np.uint8) for size in sizes]
        self._paths = [folder / str(number) for number in range(len(sizes))]
        self._folder = folder
        folder.mkdir()

    def turn(self) -> tuple[float, ...]:
        """Seconds to write the files, to read them from the disk, and to read them from the page cache."""
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        with ThreadPoolExecutor(len(self._paths)) as threads:
            began = time.perf_counter()
            list(threads.map(self._write, self._paths, self._buffers, self._cores))
            seconds = [time.perf_counter() - began]
            for cached in (False, False, True):
                if not cached:
                    drop(self._paths)
                began = time.perf_counter()
                list(threads.map(_read, self._paths, self._buffers, self._cores))
                seconds.append(time.perf_counter() - began)
        del seconds[1]
        return tuple(seconds)

    def _write(self, path: Path, buffer: NDArray[np.uint8], cores: set[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < len(buffer):  # Linux writes at most 2 GiB at once
                written += file.write(buffer.data[written:])
            os.fsync(file.fileno())


def _read(path: Path, buffer: NDArray[np.uint8], cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    with path.open("rb", buffering=0) as file:
        taken = 0
        while taken < len(buffer):
            taken += file.readinto(buffer.data[taken:])


if __name__ == "__main__":
    main()
