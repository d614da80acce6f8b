"""A batch from one mesh to another, in milliseconds: by reference, through the controller, and between peers.

    python bench/handoff.py --mib 1,16,128,512 --json F [--rounds N] [--engine processes|ray] [--without verl]

Two ranks make the batch. Two other ranks read every byte of it. Its rows are divided anew by tokens, into runs if these
are as even as here. The makers' halves differ by some rows, which their reader joins to those of the other maker. The
columns are those of training (13 bytes per token), with ragged rows, log-uniform from 256 to 4,096 tokens. The peers
get as many rows of equal length and about equal bytes. This favours them: they pad, but have nothing to pad. The makers
keep their rows ready, and each return puts them into shared memory.

by reference            `await readers.read(await makers.make())`
through the controller  the same, but it loads all columns and makes a new batch of them
bare Ray                bench/peers/ray_rows.py
verl                    bench/peers/verl_dispatch.py: its default, and its other ways, the best of which counts

Each project runs in a separate process with the same allocator settings. All except meshrl on `processes` have their
own Ray with a store of 3 GiB. Up to 128 MiB they take turns. Larger batches run one project after another, because they
do not fit into 24 GiB together. The first 2 to 12 turns do not count, because the first access to each page of shared
memory is slow. The controller's memory is measured separately, in a new process per contestant, warmed up on 1 MiB: the
peak of its own memory, without mapped shared pages. The copying code counts how often each byte is copied. verl needs
`make peers`; `--without verl` leaves it out, and the targets against it. About 10 minutes.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Never

import numpy as np
from numpy.typing import NDArray

from bench.harness import (
    ROOT,
    Figure,
    Worker,
    add_engine,
    arguments,
    at_least,
    at_most,
    figure,
    machine_cores,
    median,
    report,
    start_ray,
    take_turns,
)
from bench.peers.contest import answer
from bench.peers.payload import COLUMNS, STORE_BYTES, TOKEN_BYTES, agree, checksum, row_lengths, token_columns
from meshrl import Actor, Batch, Gather, Mesh, Ragged, Resources, Shard, Sum, current_rank, endpoint
from meshrl.engines import make_engine
from meshrl.engines.local import RankLoop
from meshrl.mesh import pool

VERL: Final = ROOT / ".peers/verl/bin/python"
PEERS: Final = ROOT / "bench/peers"
COMMANDS: Final[Mapping[str, Sequence[str | Path]]] = {
    "meshrl": (sys.executable, ROOT / "bench/handoff.py", "--worker"),
    "ray": (sys.executable, PEERS / "ray_rows.py"),
    "verl": (VERL, PEERS / "verl_dispatch.py"),
}
OURS: Final = "by reference"
DEFAULT: Final = "verl's default"
WAYS: Final = {
    OURS: ("meshrl", "reference"),
    "through the controller": ("meshrl", "controller"),
    "bare Ray, torch": ("ray", "torch"),
    "bare Ray, numpy put once": ("ray", "numpy"),
    "bare Ray, references by hand": ("ray", "references"),
    DEFAULT: ("verl", "default"),
    "verl, numpy": ("verl", "numpy"),
    "verl, futures": ("verl", "future"),
    "verl, futures of TensorDict": ("verl", "future_tensordict"),
}
"""Projects and their ways."""
JUDGED: Final = 128
"""MiB for which there are targets."""
TOGETHER: Final = 128
"""MiB up to which all projects fit into memory together and take turns."""


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--mib", default="1,16,128,512", help="sizes of the batch in MiB (default: 1,16,128,512)")
    parser.add_argument("--without", choices=("verl",), help="the peer that is left out")
    parser.add_argument("--worker", action="store_true", help="be the contestant meshrl")
    add_engine(parser)
    options = parser.parse_args()
    if options.worker:
        contest(options.engine)
        return
    sizes = [int(size) for size in options.mib.split(",")]
    projects = {name: partial(project, name, options.engine) for name in COMMANDS if name != options.without}
    times: dict[int, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(begin()) for name, begin in projects.items()}
        for mib in (size for size in sizes if size <= TOGETHER):
            times[mib] = measure(mib, workers, options.rounds)
    for mib in (size for size in sizes if size > TOGETHER):
        times[mib] = {}
        for name, begin in projects.items():
            with begin() as worker:
                times[mib] |= measure(mib, {name: worker}, options.rounds)
    figures = [each for mib in sizes for each in compare(mib, times[mib])]
    if JUDGED in sizes:
        figures += copies(projects["meshrl"])
        figures += [memory(name, projects[who]) for name, (who, _) in WAYS.items() if who in projects]
    report(f"handoff on {options.engine}", figures, options.json)


def project(name: str, engine: str) -> Worker:
    """Start a project's process. `engine`: where meshrl's ranks run."""
    if name == "verl" and not VERL.exists():
        raise SystemExit(
            f"{VERL.relative_to(ROOT)} is not there: run `make peers` first, or leave it out: --without verl"
        )
    return Worker([*COMMANDS[name], *(["--engine", engine] if name == "meshrl" else [])], machine_cores())


def measure(mib: int, workers: Mapping[str, Worker], rounds: int) -> dict[str, float]:
    """Hand over a batch of one size in every way of these projects, in turns. Returns seconds."""
    prepare(mib, workers)
    turns = {name: partial(handoff, workers[who], how) for name, (who, how) in WAYS.items() if who in workers}
    take_turns(turns, warming(mib))
    return {name: median(values) for name, values in take_turns(turns, rounds).items()}


def warming(mib: int) -> int:
    """Approximate number of turns until every page of the store was used."""
    return max(2, min(12, STORE_BYTES // 2**21 // mib))


def compare(mib: int, times: Mapping[str, float]) -> list[Figure]:
    """Compare the ways."""
    ours, verl = times[OURS], {name: wall for name, wall in times.items() if WAYS[name][0] == "verl"}
    figures: list[Figure] = []
    if verl:
        for peer, wall, target in ((DEFAULT, verl[DEFAULT], 18), ("verl's best", min(verl.values()), 2.5)):
            speeds = (f"speed, {mib} MiB, {OURS}, against {peer}", mib / ours, "MiB/s", mib / wall)
            figures.append(at_least(*speeds, target=target) if mib == JUDGED else figure(*speeds))
    rest = [
        figure(f"wall, {mib} MiB, against {name}", ours * 1e3, "ms", wall * 1e3)
        for name, wall in times.items()
        if name != OURS
    ]
    return [*figures, *rest]


def prepare(mib: int, workers: Mapping[str, Worker]) -> float:
    """Let every project make its rows, with about the same bytes. Returns MiB."""
    lengths = row_lengths(mib, 2)
    rows = len(lengths[0])
    tokens = round(sum(int(part.sum()) for part in lengths) / (2 * rows))
    made = {
        name: worker.ask(do="prepare", mib=mib)["value"]
        if name == "meshrl"
        else worker.ask(do="prepare", rows=rows, tokens=tokens)["value"]
        for name, worker in workers.items()
    }
    if max(made.values()) > 1.002 * min(made.values()):
        raise SystemExit(f"the projects made different numbers of tokens: {made}")
    return min(made.values()) * TOKEN_BYTES / 2**20


def handoff(worker: Worker, how: str) -> float:
    """Seconds of a handoff."""
    return worker.ask(do="handoff", how=how)["value"]


def copies(begin: Callable[[], Worker]) -> list[Figure]:
    """How often each byte of a batch is copied on its way, counted by the code itself."""
    with begin() as worker:
        prepare(JUDGED, {"meshrl": worker})
        made = {side: worker.ask(do="copied", side=side)["value"] for side in ("makers", "readers", "controller")}
    most = {"makers": 1, "readers": 1, "controller": 0}
    return [
        at_most(f"copies of each byte, {JUDGED} MiB, {OURS}, by the {side}", count, "", most[side])
        for side, count in made.items()
    ]


def memory(name: str, begin: Callable[[], Worker]) -> Figure:
    """Growth of the controller's own memory during its first large batches."""
    who, how = WAYS[name]
    with begin() as worker:
        prepare(1, {who: worker})
        for _ in range(3):
            handoff(worker, how)
        prepare(JUDGED, {who: worker})
        grown = max(worker.ask(do="handoff", how=how)["memory"] for _ in range(3))
    label = f"controller's memory, {JUDGED} MiB, {name}"
    return at_most(label, grown, "MiB", 1) if name == OURS else figure(label, grown, "MiB")


class Rows(Actor):
    """Makes rows, and reads them."""

    def __init__(self) -> None:
        self._rows = Batch.of()

    @endpoint
    async def prepare(self, mib: int) -> Sum[NDArray[np.int64]]:
        """Make this rank's share of `mib` MiB. Returns a checksum of each column."""
        rank = current_rank()
        lengths = row_lengths(mib, rank.size)[rank.index]
        columns = token_columns(int(lengths.sum()), rank.index)
        self._rows = Batch({name: packed(column, lengths) for name, column in columns.items()})
        return sums_of(self._rows)

    @endpoint
    async def make(self) -> Gather[Batch]:
        """Return this rank's rows."""
        return self._rows

    @endpoint
    async def copied(self) -> Sum[NDArray[np.int64]]:
        """Bytes that this rank has copied so far in transfers."""
        return np.array([copied_here()])

    @endpoint
    async def read(self, batch: Shard[Batch]) -> Sum[NDArray[np.int64]]:
        """Read every byte. Returns a checksum of each column."""
        return sums_of(batch)


def copied_here() -> int:
    """Bytes that this process has copied into and out of shared memory in transfers."""
    return pool.copied + pool.gathered


def packed(values: NDArray[np.generic], lengths: NDArray[np.int64]) -> Ragged:
    """Rows of these lengths."""
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))


def sums_of(batch: Batch) -> NDArray[np.int64]:
    """A checksum of each column."""
    return np.array([checksum(batch.ragged(name).values) if name in batch else 0 for name in COLUMNS])


class Contest:
    """The meshes, and their measurements."""

    def __init__(self, makers: Rows, readers: Rows) -> None:
        self._makers, self._readers = makers, readers
        self._truth = np.zeros(len(COLUMNS), np.int64)
        self._new: dict[str, Ragged] = {}
        self._nbytes = 0

    async def prepare(self, mib: int) -> float:
        """Make the rows. Returns tokens."""
        self._truth = await self._makers.prepare(mib)
        parts = row_lengths(mib, 2)
        lengths = np.concatenate(parts)
        columns = token_columns(int(lengths.sum()), seed=2)
        self._nbytes = int(lengths.sum()) * TOKEN_BYTES + sum(8 * (len(part) + 1) for part in parts)
        self._new = {name: packed(column, lengths) for name, column in columns.items()}
        return float(lengths.sum())

    async def handoff(self, how: str) -> float:
        """Seconds of one of the two ways."""
        began = time.perf_counter()
        batch = await self._makers.make()
        if how == "controller":
            batch = Batch((await batch.load()).columns)
        sums = await self._readers.read(batch)
        wall = time.perf_counter() - began
        assert agree(sums, self._truth)
        return wall

    async def roundtrip(self, replaced: Sequence[str]) -> float:
        """Seconds to make rows, read them here, replace columns, and read them again on the same ranks."""
        began = time.perf_counter()
        batch = await (await self._makers.make()).load()
        seen = sums_of(batch)
        batch = batch.assign(**{name: self._new[name] for name in replaced})
        sums = await self._makers.read(batch)
        wall = time.perf_counter() - began
        assert agree(seen, self._truth)
        changed = np.isin(list(COLUMNS), replaced)
        assert agree(sums, np.where(changed, sums_of(Batch(self._new)), self._truth))
        return wall

    async def copied(self, side: str) -> float:
        """How often one side copies each byte of a transferred batch, including row offsets."""
        before = await self._copied(side)
        await self.handoff("reference")
        return (await self._copied(side) - before) / self._nbytes

    async def _copied(self, side: str) -> int:
        if side == "controller":
            return copied_here()
        ranks = {"makers": self._makers, "readers": self._readers}[side]
        return int((await ranks.copied())[0])

    async def reading(self) -> float:
        """Seconds of a round trip spent only on reading."""
        batch = await (await self._makers.make()).load()
        sums_of(batch)
        began = time.perf_counter()
        sums_of(batch)
        return time.perf_counter() - began


def contest(name: str) -> None:
    """Run as the contestant meshrl on an engine."""
    if name == "ray":
        start_ray(STORE_BYTES)
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        engine = make_engine(name)

        async def spawn() -> Rows:
            mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
            return await mesh.spawn(Rows)

        def blocking(method: Callable[..., Coroutine[Never, Never, float]]) -> Callable[..., float]:
            return lambda **question: runner.run(method(**question))

        try:
            made = Contest(runner.run(spawn()), runner.run(spawn()))
            methods = (made.prepare, made.handoff, made.roundtrip, made.reading, made.copied)
            answer({method.__name__: blocking(method) for method in methods})
        finally:
            runner.run(engine.close())


if __name__ == "__main__":
    main()
