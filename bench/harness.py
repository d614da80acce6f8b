"""The shared part of benchmarks: contestants that take turns, one JSON format, one table.

`python bench/NAME.py --json F` writes one object: {"bench", "commit", "machine", "figures": [{"name",
"value", "unit", "peer", "ratio", "target", "ok"}]}. `ratio` is value / peer. `target` bounds the ratio from
below (`at_least`) or the value from above (`at_most`). A missed target is printed as missed; the exit status
is 0 all the same.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(10**10),
    "MALLOC_TRIM_THRESHOLD_": str(10**10),
}
"""Keep freed memory in the process, in large pages. Otherwise fresh pages cost torch on CPUs a tenth of its time or
more. TRL is fastest with all of these settings, and every contestant gets them."""


@dataclass(frozen=True)
class Figure:
    """One measured number, with the peer or limit measured in the same run."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    target: float | None = None
    ok: bool | None = None


def figure(name: str, value: float, unit: str, peer: float | None = None) -> Figure:
    """A number without a target."""
    return Figure(name, value, unit, peer, None if peer is None else value / peer)


def at_least(name: str, value: float, unit: str, peer: float, target: float) -> Figure:
    """A number that should be at least `target` times the peer's."""
    return Figure(name, value, unit, peer, value / peer, target, value / peer >= target)


def at_most(name: str, value: float, unit: str, target: float, peer: float | None = None) -> Figure:
    """A number that should be at most `target`, in its own unit."""
    return Figure(name, value, unit, peer, None if peer is None else value / peer, target, value <= target)


def within(name: str, value: float, unit: str, peer: float, target: float) -> Figure:
    """A number that should be at most `target` times the peer's."""
    return Figure(name, value, unit, peer, value / peer, target, value / peer <= target)


def with_allocator() -> None:
    """Restart the script under ALLOCATOR, for a benchmark that measures in its own process."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})  # noqa: S606 -- ourselves


def copier(nbytes: int) -> Callable[[], float]:
    """A function that copies `nbytes` in one thread into warm memory, and returns the seconds.

    It copies in blocks of a MiB. For one block of 512 MiB the C library takes twice as long, because it bypasses the
    caches.
    """
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    blocks = [slice(start, start + 2**20) for start in range(0, nbytes, 2**20)]

    def copy() -> float:
        began = time.perf_counter()
        for block in blocks:
            np.copyto(target[block], source[block])
        return time.perf_counter() - began

    copy()
    return copy


def machine_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def start_ray(store: int | None = None) -> None:
    """Start a private Ray for all contestants in this process. `store`: bytes of its object store."""
    import ray  # noqa: PLC0415 -- an extra, and slow to import

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        "local",
        num_cpus=machine_cores(),
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def take_turns(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Each contestant's results. Each has one turn per round, and the order reverses from round to round.

    Other load and the temperature of the machine then affect all contestants alike.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(contestants[name]())
    return results


def median(values: Sequence[float]) -> float:
    """The middle of several measurements."""
    return float(statistics.median(values))


class Worker:
    """A contestant in a separate process with a number of cores: one JSON line in, one JSON line out.

    It works only between a question and its answer, so waiting contestants do not disturb the active one. It writes
    {"ready": true} first.
    """

    def __init__(self, command: Sequence[str | Path], threads: int) -> None:
        with _cores(threads):
            self._process = subprocess.Popen(
                [str(word) for word in command],
                env=_environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._answer()

    def ask(self, **question: object) -> dict[str, float]:
        """Send one question and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """CPU time so far of the worker and its living child processes."""
        worker = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (worker, *worker.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the worker's input, which ends it, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(
            f"The worker {self._process.args!r} ended with status {self._process.wait()} before it "
            "answered; its own message is above."
        )


def alone(command: Sequence[str | Path], threads: int) -> None:
    """Run a contestant to its end on a number of cores. SystemExit with its last output if it fails."""
    words = [str(word) for word in command]
    with _cores(threads):
        done = subprocess.run(
            words, check=False, cwd=ROOT, env=_environment(threads), capture_output=True, encoding="utf-8"
        )
    if done.returncode:
        raise SystemExit(f"{words} ended with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _environment(threads: int) -> dict[str, str]:
    """A contestant's environment: its threads, its allocator settings, and less output."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # raised by TRL about transformers
        "TOKENIZERS_PARALLELISM": "false",
        **ALLOCATOR,
    }


@contextlib.contextmanager
def _cores(count: int) -> Generator[None]:
    """Restrict processes started inside to the first `count` of our cores."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(ours)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def arguments(doc: str | None, rounds: int | None) -> argparse.ArgumentParser:
    """A parser with `--json` and `--rounds` (default `rounds`). The script adds further options."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contestant; the median counts")
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add `--engine`, for a script whose ranks are always processes."""
    parser.add_argument(
        "--engine", choices=("processes", "ray"), default="processes", help="where the ranks run (default: processes)"
    )


def report(bench: str, figures: Sequence[Figure], json_path: Path | None) -> None:
    """Print the figures as a table and, with a path, write them as JSON."""
    table = Table(title=f"{bench} · {_commit()} · {machine()['cpu']}, {machine()['cores']} cores")
    for heading in ("figure", "value", "unit", "peer", "ratio", "target", ""):
        table.add_column(heading, justify="left" if heading in ("figure", "unit", "") else "right")
    for each in figures:
        numbers = [_short(number) for number in (each.peer, each.ratio, each.target)]
        verdict = {None: "", True: "[green]met", False: "[red]missed"}[each.ok]
        table.add_row(each.name, _short(each.value), each.unit, *numbers, verdict)
    # A file or a pipe has no width: do not cut lines there.
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if json_path is not None:
        content = {
            "bench": bench,
            "commit": _commit(),
            "machine": machine(),
            "figures": [asdict(each) for each in figures],
        }
        json_path.write_text(json.dumps(content, indent=2) + "\n")


def machine() -> dict[str, str | int | float]:
    """CPU model, available cores, memory in GiB, the Python version, and the GPU if a benchmark has used torch."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch and torch.cuda.is_available() else ""  # "Fake GPU" in .venv-fake-cuda
    return {
        "cpu": model,
        **({"gpu": gpu} if gpu else {}),
        "cores": machine_cores(),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
    }


def _commit() -> str:
    """The measured commit, with `+` if the working tree differs from it."""

    def git(*words: str) -> str:
        command = [shutil.which("git") or "git", *words]
        return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain") else "")


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
