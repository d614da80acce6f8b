"""A run on several hosts that suffers fault after fault, for `bench/soak.py`.

GRPO of a tiny model with `ahead` = 2: a policy on the first host and a sampler on each of the others, of which one is
enough. Faults follow one another, in an order and after pauses that a seed determines. The process of a sampler or of
the policy is killed. A host dies forever, and a new one joins. A host is cut off for less than `run.patience`, and for
more. The controller is killed and restarted. A fault counts as repaired when the run has progressed and has all its
samplers. At the end `audit_run` says whether any prompt was lost or trained twice.

After each repair, the resources of all hosts are summed: memory, descriptors, processes, threads, shared memory.
"""

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT
from threading import Lock
from typing import Final, NamedTuple

import psutil

from bench.harness import Figure, at_most, figure
from meshrl.run import audit_run
from tests.support.cluster import Cluster, Host, Inside

PATIENCE: Final = 10.0
"""`run.patience`."""
RANK: Final = "^ray::RankProces"
"""Pattern of a rank's process, by the 15 letters of its name. Ray rewrites the command line at each call, with
delay."""
BRIEF, LONG = 5.0, 30.0
"""Seconds of a cut that the run survives, and of one that it does not."""
AHEAD: Final = 2
"""Steps that a stopped run may still take with rows that it already has."""
PAUSE: Final = 5.0, 20.0
"""Range of seconds between a repair and the next fault."""
LATEST: Final = 240.0
"""Time limit of a repair in seconds."""
LOOKS: Final = 8
"""Samples of the shared memory, of which the lowest counts."""
SHARED: Final = "shared memory, MiB"
GROWTH: Final = 1.1
"""Allowed ratio of use in the last third of the time to the first third."""
CONFIG: Final = """
algorithm = "grpo"
steps = 1_000_000
prompts = 8
ahead = AHEAD

[run]
name = "soak"
checkpoint_every = 20
resume = true
restarts = 1_000_000
samples_every = 1000

[run.meshes.main]
cpus = 1
custom = { node1 = 1 }

[run.meshes.rollout]
ranks = RANKS
min_ranks = 1
cpus = 1
custom = { rollout = 1 }

[task]
source = "words.jsonl"
held_out = 8
held_out_fraction = 0.2

[policy]
backend = "torch"
model = { characters = "abcdefgh>", hidden_size = 64, ffn_size = 128, layers = 2, heads = 2, max_tokens = 16 }

[sampler]
mesh = "rollout"

[sampling]
n = 4
max_tokens = 5

[reward]
function = "rewards.py:right_letters"
"""
REWARD: Final = """
def right_letters(prompt, completion, row):
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""


class Broken:
    """The run, its hosts, and the faults done to them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._log = folder / "controller.log"
        self._changing = Lock()
        """Held while the controller is killed and restarted."""
        self._controller = self._begun()

    def _begun(self) -> Inside:
        command = ["meshrl", "run", "soak.toml", f"run.engine={self.cluster.address}", f"run.patience={PATIENCE}"]
        with self._log.open("a") as log:
            return self.cluster.hosts[0].start(["env", "-C", str(self.folder), *command], stdout=log, stderr=STDOUT)

    def step(self) -> int:
        """The last recorded step, -1 before the first."""
        with suppress(OSError, IndexError, ValueError), (self.folder / "runs/soak/metrics.jsonl").open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - 10_000))
            return int(json.loads(lines.read().rpartition(b"\n")[0].splitlines()[-1])["step"])
        return -1

    def wait_until(self, so: Callable[[], bool], what: str, seconds: float = LATEST) -> None:
        """Wait for a condition. SystemExit, with the controller's last output, if it has ended or the time is over."""
        until = time.monotonic() + seconds
        while not so():
            with self._changing:
                has_ended = self._controller.poll() is not None
            if has_ended or time.monotonic() > until:
                ended = (
                    f"status {self._controller.returncode}" if self._controller.returncode is not None else "it runs"
                )
                raise SystemExit(f"{what}: not within {seconds:g} s ({ended}):\n{self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text("utf-8").splitlines()[-100:])

    def goes_on_after(self, fault: "Fault") -> tuple[float, float]:
        """Seconds from a fault until the run has progressed, and until all its samplers are back too."""
        told, began = self._log.stat().st_size, time.monotonic()
        mend = fault.break_it(self)
        step = self.step()  # steps are fast: some were made during the fault
        with ThreadPoolExecutor(1) as other:  # the run may continue before the fault is mended
            mended = other.submit(mend) if mend else None
            self.wait_until(lambda: self.step() > step + AHEAD, "the run continues")
            further = time.monotonic() - began
            if mended:
                mended.result()
        if fault.loses_a_sampler:
            self.wait_until(
                lambda: b"a replica of the sampler is available" in self._log.read_bytes()[told:], "it is whole"
            )
        return further, time.monotonic() - began

    def sampling(self, place: float) -> Host:
        """A host with a sampler: the one at `place`, 0 to 1, of all of them. A run that has just begun has none yet."""
        found: list[Host] = []

        def some() -> bool:
            on = [host for host in self.cluster.hosts[1:] if host.is_on]
            found[:] = [host for host in on if host.run(["sh", "-c", f"pgrep {RANK}; true"])]
            return bool(found)

        self.wait_until(some, "it has a sampler")
        return found[int(place * len(found))]

    def end(self) -> None:
        """End the run as by Ctrl-C. SystemExit, with the stacks of its threads, if it does not end."""
        self._controller.send_signal(signal.SIGINT)
        until = time.monotonic() + LATEST
        while self._controller.poll() is None:
            if time.monotonic() > until:
                self._controller.send_signal(signal.SIGABRT)  # Python's handler prints the stacks
                self._controller.wait()
                raise SystemExit(f"it does not end within {LATEST:g} s of Ctrl-C:\n{self._last_words()}")
            time.sleep(0.1)

    def kill_controller(self) -> None:
        """Kill the controller and restart it."""
        with self._changing:
            self._controller.kill()
            self._controller.wait()
            self._controller = self._begun()

    def used(self) -> dict[str, float]:
        """Resources of all hosts together, and the run's folder without files that grow each step."""
        totals: defaultdict[str, float] = defaultdict(float)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                totals["memory, MiB"] += process.memory_full_info().uss / 2**20
                totals["descriptors"] += process.num_fds()
                totals["processes"] += 1
                totals["threads"] += process.num_threads()
        totals[SHARED] = min(self._shared_memory() for _ in range(LOOKS))
        checkpoints = (self.folder / "runs/soak").glob("checkpoints/**/*")
        totals["checkpoints, MiB"] = sum(path.stat().st_size for path in checkpoints if path.is_file()) / 2**20
        return totals

    def _shared_memory(self) -> float:
        """MiB of named shared memory on all hosts now. Some segments belong to calls in progress."""
        used = ["sh", "-c", "du -sk /dev/shm 2> /dev/null; true"]  # a file may go while it looks
        there = [host.run(used) for host in self.cluster.hosts if host.is_on]
        return sum(int(said.split()[0]) for said in there) / 1024


class Fault(NamedTuple):
    """A possible fault."""

    name: str
    loses_a_sampler: bool
    break_it: Callable[[Broken], Callable[[], None] | None]
    """Causes the fault. Returns the function that mends it, if it needs mending."""


def faults(luck: random.Random) -> Iterator[Fault]:
    """Yield faults. Each kind comes once before any is repeated.

    A fault draws from `luck` once at most, however long it waits for a sampler: so a seed determines all of them.
    """

    def sampler_killed(run: Broken) -> None:
        place = luck.random()
        killed = f"pkill -KILL {RANK} && echo killed; true"
        run.wait_until(lambda: bool(run.sampling(place).run(["sh", "-c", killed])), "a sampler's process is found")

    def policy_killed(run: Broken) -> None:
        run.cluster.hosts[0].run(["pkill", "-KILL", RANK])

    def host_replaced(run: Broken) -> Callable[[], None]:
        run.sampling(luck.random()).kill()

        def mend() -> None:
            run.cluster.add()

        return mend

    def cut_briefly(run: Broken) -> Callable[[], None]:
        host = run.sampling(luck.random())
        host.cut()

        def mend() -> None:
            time.sleep(BRIEF)
            host.heal()

        return mend

    def cut_long(run: Broken) -> Callable[[], None]:
        host = run.sampling(luck.random())
        host.cut()

        def mend() -> None:
            time.sleep(LONG)
            host.kill()  # like Ray's node there, which ends itself when it learns that it was given up
            host.boot()

        return mend

    kinds = [
        Fault("a sampler's process is killed", True, sampler_killed),
        Fault("the policy's process is killed", False, policy_killed),
        Fault("a host dies, and a new one joins", True, host_replaced),
        Fault(f"a host is cut off for {BRIEF:g} s", False, cut_briefly),
        Fault(f"a host is cut off for {LONG:g} s", True, cut_long),
        Fault("the controller is killed", False, Broken.kill_controller),
    ]
    while True:
        luck.shuffle(kinds)
        yield from kinds


def soak_with_faults(hosts: int, minutes: float, seed: int) -> list[Figure]:
    """Break the run for `minutes`, and check the outcome."""
    luck = random.Random(seed)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(100)]
        rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
        (folder / "words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
        (folder / "rewards.py").write_text(REWARD, "utf-8")
        (folder / "soak.toml").write_text(CONFIG.replace("RANKS", str(hosts - 1)).replace("AHEAD", str(AHEAD)), "utf-8")
        stacks = {"PYTHONFAULTHANDLER": "1"}
        with Cluster(hosts, resources=[{}, *[{"rollout": 1}] * 98], shared=[folder], environment=stacks) as cluster:
            run = Broken(cluster, folder)
            run.wait_until(lambda: run.step() > 1, "the run begins")
            times, used = _broken(run, luck, 60 * minutes)
            run.end()
        return _figures(folder, times, used)


def _broken(
    run: Broken, luck: random.Random, seconds: float
) -> tuple[dict[str, list[tuple[float, float]]], list[dict[str, float]]]:
    """Seconds of each repair, and the resources in use after each."""
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    used: list[dict[str, float]] = []
    until = time.monotonic() + seconds
    for fault in faults(luck):
        time.sleep(luck.uniform(*PAUSE))
        if time.monotonic() > until:
            break
        times[fault.name].append(run.goes_on_after(fault))
        used.append(run.used())
        print(
            f"{until - time.monotonic():.0f} s left: {fault.name}: {times[fault.name][-1]}; {dict(used[-1])}",
            flush=True,
        )
    return dict(times), used


def _figures(folder: Path, times: dict[str, list[tuple[float, float]]], used: list[dict[str, float]]) -> list[Figure]:
    audit = audit_run(folder / "runs/soak")
    prompts = audit.prompts
    third = max(1, len(used) // 3)
    whole = [both[1] for each in times.values() for both in each]
    figures = [
        figure("steps", audit.steps, "steps"),
        figure("prompts trained", len(prompts.trained), "prompts"),
        at_most("prompts lost", sum(stop - start for start, stop in prompts.all_missing), "prompts", 0),
        at_most("prompts trained twice", len(prompts.twice), "prompts", 0),
        at_most("promises broken", sum(not verdict.holds for verdict in audit.verdicts), "promises", 0),
        figure("faults", len(whole), "faults"),
        *([figure("all repaired: mean", statistics.mean(whole), "s")] if whole else []),
    ]
    for name, each in sorted(times.items()):
        figures.append(
            figure(f"{name}, {len(each)} times: mean until it continues", statistics.mean(one for one, _ in each), "s")
        )
        figures.append(figure("  and has all samplers", statistics.mean(two for _, two in each), "s"))
        for number, (one, two) in enumerate(each, 1):
            figures.append(figure(f"  time {number}: until it continues", one, "s"))
            figures.append(figure(f"  time {number}: has all samplers", two, "s"))
    for name in used[0] if used else ():
        usual = min if name == SHARED else statistics.median  # segments of running calls come and go
        first, last = (usual(each[name] for each in part) for part in (used[:third], used[-third:]))
        figures.append(at_most(f"{name}: last third, and by the first", last, "", GROWTH * first, first or None))
    return figures
