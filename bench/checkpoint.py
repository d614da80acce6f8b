"""`checkpoint` and `restore` of a policy in MB/s, against a raw write and read of the same bytes in as many files.

    python bench/checkpoint.py --json F [--rounds N] [--mib 1024]

A policy after one step: float32 weights and both of AdamW's moments. Checkpoints are awaited, and a rank has one
thread. A run writes its checkpoints from a copy of the state (`wait = False`, then `written`). The raw contestant has
as many files of the same sizes, one thread for each, warm memory, and Python's `write` and `readinto`. The backend fsdp
calls fsync on each file, the backend torch does not, and the raw contestant does the same as the backend it is compared
with. Files are written anew each time. Reads come from the page cache, because the files have just been written.
Contestants take turns, after two rounds of warm-up. Both directions should reach half the speed of the raw write. The
raw read is shown too.

torch, 1 rank       a thread of this process
fsdp, 1 rank        the same
fsdp, 2 ranks       processes on Ray, each with its own file

About 5 minutes.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
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

LAYERS: Final = 4
WARM_UP: Final = 2
ROWS: Final = {"prompt": ["abc>", "fgh>", "b>", "ca>"], "completion": ["cba", "hgf", "b", "ac"]}


@dataclass(frozen=True)
class Subject:
    """A backend, its ranks, and whether it calls fsync."""

    backend: str
    ranks: int
    syncs: bool

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.backend}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


SUBJECTS: Final = (Subject("torch", 1, False), Subject("fsdp", 1, True), Subject("fsdp", 2, True))


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--mib", type=int, default=1024, help="about how large a checkpoint is (default: 1024)")
    options = parser.parse_args()
    with_allocator()
    figures: list[Figure] = []
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        for subject in SUBJECTS:
            figures += runner.run(compare(subject, options.mib, options.rounds))
    report("checkpoint", figures, options.json)


async def compare(subject: Subject, mib: int, rounds: int) -> list[Figure]:
    """Let both take turns, and compare their medians."""
    seconds: dict[str, list[tuple[float, ...]]] = {"meshrl": [], "raw": []}
    with tempfile.TemporaryDirectory() as folder:
        meshes = {"train": MeshConfig(ranks=subject.ranks, cpus=1)}
        engine = "ray" if subject.ranks > 1 else "local"
        async with Run(RunConfig(folder=folder, name="run", engine=engine, meshes=meshes)) as run:
            config = PolicyConfig(backend=subject.backend, model=model(mib), mesh="train")
            policy = await run.spawn(Policy, config)
            await policy.update(await policy.encode(Batch.of(**ROWS)), CrossEntropy())
            here = f"{folder}/checkpoint"
            await policy.checkpoint(here)
            raw = Raw(sizes(here), Path(folder, "raw"), subject.syncs)
            for number in range(rounds + WARM_UP):
                for turn in sorted(seconds, reverse=number % 2 == 0):
                    seconds[turn].append(raw.turn() if turn == "raw" else await turn_of(policy, here))
    (write, read, copied), (raw_write, raw_read) = (
        [raw.nbytes / 1e6 / median(times) for times in zip(*turns[WARM_UP:], strict=True)] for turns in seconds.values()
    )
    label = f"{subject.name}, {raw.nbytes / 1e6:,.0f} MB"
    synced = "with fsync" if subject.syncs else "without fsync"
    return [
        at_least(f"checkpoint, {label}, {synced}", write, "MB/s", raw_write, 0.5),
        figure(f"checkpoint from a copy, {label}, {synced}", copied, "MB/s", raw_write),
        at_least(f"restore, {label}", read, "MB/s", raw_write, 0.5),
        figure(f"restore against a raw read, {label}", read, "MB/s", raw_read),
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


def sizes(folder: str) -> list[int]:
    """Size of each file in bytes."""
    return [file.stat().st_size for file in sorted(Path(folder).iterdir())]


async def turn_of(policy: Policy, folder: str) -> tuple[float, ...]:
    """Seconds to write a checkpoint, to restore it, and to write it from a copy."""
    shutil.rmtree(folder)
    began = time.perf_counter()
    await policy.checkpoint(folder)
    written = time.perf_counter()
    await policy.restore(folder)
    taken = time.perf_counter()
    shutil.rmtree(folder)
    removed = time.perf_counter()
    await policy.checkpoint(folder, wait=False)
    await policy.written()
    return written - began, taken - written, time.perf_counter() - removed


class Raw:
    """The raw contestant."""

    def __init__(self, sizes: Sequence[int], folder: Path, syncs: bool) -> None:
        self.nbytes = sum(sizes)
        self._buffers: list[NDArray[np.uint8]] = [np.ones(size, np.uint8) for size in sizes]
        self._paths = [folder / str(number) for number in range(len(sizes))]
        self._folder, self._syncs = folder, syncs
        folder.mkdir()

    def turn(self) -> tuple[float, ...]:
        """Seconds to write the files and to read them."""
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        with ThreadPoolExecutor(len(self._paths)) as threads:
            began = time.perf_counter()
            list(threads.map(self._write, self._paths, self._buffers))
            written = time.perf_counter()
            list(threads.map(_read, self._paths, self._buffers))
            return written - began, time.perf_counter() - written

    def _write(self, path: Path, buffer: NDArray[np.uint8]) -> None:
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < len(buffer):  # Linux writes at most 2 GiB at once
                written += file.write(buffer.data[written:])
            if self._syncs:
                os.fsync(file.fileno())


def _read(path: Path, buffer: NDArray[np.uint8]) -> None:
    with path.open("rb", buffering=0) as file:
        taken = 0
        while taken < len(buffer):
            taken += file.readinto(buffer.data[taken:])


if __name__ == "__main__":
    main()
