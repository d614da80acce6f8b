"""Runs that are killed at random moments, on real processes, and resumed: what is lost, and what is left behind.

    python bench/kills.py --kills 200 --seed 0 --json F [--engines local processes ray] [--backend fake|torch]

`meshrl run` of `grpo` with a policy and a sampler on separate meshes, columns in shared memory, and a checkpoint every
third step. The controller gets SIGKILL, SIGTERM and SIGINT in turn, at a moment drawn by the seed. Half of the moments
are anywhere from the first import to the last file, and half are between two steps of training. Then the same command
resumes the run, and may be killed again. When a run has ended, `meshrl.run.audit_run` checks by its files whether each
prompt was trained once or dropped, versions rose and the bound held. With `ahead` = 0, all results must equal those of
a run that was never killed. Processes that survive a kill get time to end. Those that do not end are counted, and so
are sockets' folders and shared memory that are left at a run's end. (Ray leaves its session's folder.)
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Final

import psutil
import tomli_w

from bench.harness import Figure, arguments, at_most, figure, report
from meshrl.mesh.shared_memory import FOLDER
from meshrl.run import audit_run

STEPS: Final = 24
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENGINES: Final = ("local", "processes", "ray")
MOST: Final = 6
"""Kills of one run at most."""
PATIENCE: Final = 60.0
"""Seconds within which all processes of a killed run must end."""
LIMIT: Final = 600.0
"""Time limit of one life in seconds, after which a run counts as hanging."""
MARK: Final = "MESHRL_BENCH_KILLS"
"""Environment variable of all processes that a run starts, directly or not."""
NEW: Final = {"characters": "0123456789+= ", "hidden_size": 32, "layers": 1, "heads": 2, "max_tokens": 32}


@dataclass
class Story:
    """A run, from its first start to its end."""

    folder: Path
    engine: str
    backend: str
    ahead: int
    kills: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of its last life."""

    def write(self) -> None:
        """Write its configuration and its rows."""
        self.folder.mkdir(parents=True)
        rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(40 + 4 * STEPS)]
        Path(self.folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = {"backend": self.backend, "model": NEW if self.backend == "torch" else "none"}
        table = {
            "algorithm": "grpo",
            "prompts": 4,
            "steps": STEPS,
            "ahead": self.ahead,
            "task": {"source": "rows.jsonl", "held_out": 4, "prompt": "{question}"},
            "policy": model,
            "sampler": {**model, "mesh": "rollout"},
            "reward": {"function": "exact_match"},
            "sampling": {"n": 2, "max_tokens": 4},
            "run": {
                "folder": str(self.folder),
                "engine": self.engine,
                "log": [],
                "inline_bytes": 0,  # all columns through shared memory
                "samples_every": 1,
                "checkpoint_every": 3,
                "resume": True,
                "meshes": {"main": {"cpus": 1}, "rollout": {"cpus": 1}},
            },
        }
        Path(self.folder, "run.toml").write_text(tomli_w.dumps(table))

    def begin(self, mark: str) -> subprocess.Popen[bytes]:
        """Start the run, or resume it."""
        scratch = self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        with Path(self.folder, "log").open("ab") as log:
            return subprocess.Popen(
                [str(Path(sys.executable).parent / "meshrl"), "run", str(self.folder / "run.toml")],
                cwd=self.folder,
                env={**os.environ, MARK: mark, "TMPDIR": str(scratch), "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def made(self) -> int:
        """Size of its metrics in bytes."""
        metrics = self.folder / "run/metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0

    def outcome(self) -> dict[str, object]:
        """All its results."""
        run, times = self.folder / "run", ("seconds", "step_s")
        told: dict[str, object] = {}
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
            told[name] = [{key: row[key] for key in row if key not in times} for row in rows]
        for path in sorted((run / "model").rglob("*")) + sorted(run.glob("checkpoints/*/*/*")):
            if path.is_file():
                told[str(path.relative_to(run))] = path.read_bytes()
        return told

    @property
    def has_finished(self) -> bool:
        """True if the run has finished."""
        summary = self.folder / "run/summary.json"
        return summary.exists() and json.loads(summary.read_text())["status"] == "finished"

    def last_words(self) -> str:
        """The end of its log."""
        return Path(self.folder, "log").read_text(errors="replace")[-1500:]


@dataclass
class Count:
    """The findings."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of kills by engine and signal."""
    runs: Counter[str] = field(default_factory=Counter)
    """Number of ended runs by engine."""
    trained: int = 0
    broken: list[str] = field(default_factory=list)
    """Guarantees that an audit finds broken."""
    other_bits: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Lives that failed without a kill."""
    left: list[str] = field(default_factory=list)
    """What is left after a run's end, or some time after a kill."""
    gone: list[float] = field(default_factory=list)
    """Seconds from a kill until all its processes had ended."""


def processes(mark: str) -> list[psutil.Process]:
    """Living processes that a run has started."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(mark: str, count: Count, where: str) -> None:
    """Wait until all processes of a life have ended. Count and kill those that do not end."""
    began = time.monotonic()
    while left := processes(mark):
        if time.monotonic() - began > PATIENCE:
            count.left += [f"{where}: process {each.pid}, {' '.join(each.cmdline())[:80]}" for each in left]
            for each in left:
                each.kill()
            break
        time.sleep(0.05)
    count.gone.append(time.monotonic() - began)


def live(story: Story, how: signal.Signals | None, moment: tuple[bool, float], mark: str) -> bool:
    """Run one life, and kill it at a moment, if any. True if it was killed.

    `moment`: whether it counts from a finished step, and seconds.
    """
    began, made, counts_from = time.monotonic(), story.made, None
    from_step, after = moment
    process = story.begin(mark)
    while process.poll() is None and (now := time.monotonic()) - began < LIMIT:
        if counts_from is None and (not from_step or story.made > made):
            counts_from = now
        if how is not None and counts_from is not None and now - counts_from >= after:
            process.send_signal(how)
            with suppress(subprocess.TimeoutExpired):  # counted as left behind
                process.wait(PATIENCE)
            return True
        time.sleep(0.002)
    if process.poll() is None:
        process.kill()
    process.wait()
    story.seconds = time.monotonic() - began
    return False


def tell(story: Story, whole: dict[str, object], count: Count, where: str) -> None:
    """Check the guarantees of a run that has ended."""
    count.left += [f"{where}: {path}" for path in (story.folder / "tmp").glob("meshrl-*")]
    if not story.has_finished:
        count.refused.append(f"{where}: {story.last_words()}")
        return
    found = audit_run(story.folder / "run")
    count.broken += [f"{where}: {breach}" for verdict in found.verdicts for breach in verdict.breaches]
    prompts, trained = found.prompts, len(found.prompts.trained)
    if prompts.all_missing or prompts.twice or trained != 4 * STEPS or found.steps != STEPS:
        count.broken.append(f"{where}: {trained} prompts and {found.steps} steps, missing {prompts.all_missing}")
    count.trained += trained
    count.runs[story.engine] += 1
    if not story.ahead:
        got = story.outcome()
        names = whole.keys() | got.keys()
        count.other_bits += [f"{where}: {name}" for name in names if whole.get(name) != got.get(name)]


def kill_runs(kills: int, seed: int, engines: Sequence[str], backend: str, place: Path) -> Count:
    """Start runs on the engines in turn, and kill them until the number of kills is reached."""
    random, count = Random(seed), Count()
    whole: dict[str, dict[str, object]] = {}
    lasts: dict[str, float] = {}
    for engine in engines:  # runs without kills
        story = Story(place / f"{engine}-whole", engine, backend, 0)
        story.write()
        live(story, None, (False, 0.0), mark := f"{place.name}-{engine}")
        wait_until_gone(mark, count, engine)
        whole[engine], lasts[engine] = story.outcome(), story.seconds
        print(f"{engine}: {story.seconds:.1f} s", flush=True)
    for number, engine in enumerate(cycle(engines)):
        if count.kills.total() >= kills:
            break
        story = Story(place / f"{number}", engine, backend, random.choice((0, 2)))
        story.write()
        while True:
            mark = f"{place.name}-{number}-{len(story.kills)}"
            how = SIGNALS[count.kills.total() % len(SIGNALS)] if len(story.kills) < MOST else None
            from_step = random.random() < 0.5
            moment = from_step, random.random() * lasts[engine] * (0.25 if from_step else 0.8)
            was_killed = live(story, how, moment, mark)
            where = f"run {number}, {engine}, ahead={story.ahead}, kills {', '.join(story.kills) or 'none'}"
            wait_until_gone(mark, count, where)
            if how is None or not was_killed:
                break
            count.kills[engine, how.name] += 1
            story.kills.append(how.name)
        tell(story, whole[engine], count, where)
        print(f"{count.kills.total()} kills. {where}", flush=True)
    return count


def main() -> None:
    """Kill runs, then check what is left."""
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--backend", choices=("fake", "torch"), default="fake")
    given = parser.parse_args()
    before = set(FOLDER.glob("meshrl-*"))
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        count = kill_runs(given.kills, given.seed, given.engines, given.backend, Path(place))
    count.left += [str(path) for path in set(FOLDER.glob("meshrl-*")) - before]
    for told in (*count.broken, *count.other_bits, *count.refused, *count.left):
        print(told)
    report("kills", figures(count, given.engines), given.json)


def figures(count: Count, engines: Sequence[str]) -> list[Figure]:
    """The numbers, first those that must be 0."""
    by_engine = [(engine, sum(count.kills[engine, how.name] for how in SIGNALS)) for engine in engines]
    return [
        at_most("promises broken, by the audit", len(count.broken), "breaches", 0),
        at_most("files other than without kills, ahead = 0", len(count.other_bits), "files", 0),
        at_most("lives that nobody killed, and that failed", len(count.refused), "lives", 0),
        at_most("processes, sockets and segments left behind", len(count.left), "", 0),
        *(figure(f"kills, engine {engine}", kills, "kills") for engine, kills in by_engine),
        *(figure(f"kills by {how.name}", sum(count.kills[e, how.name] for e in engines), "kills") for how in SIGNALS),
        figure("runs that ended", count.runs.total(), "runs"),
        figure("prompts trained", count.trained, "prompts"),
        figure("until all processes were gone, the longest", max(count.gone), "s"),
    ]


if __name__ == "__main__":
    main()
