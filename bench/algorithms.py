"""Each algorithm on the quickstart's model with the same budget: exact match before and after, and seconds.

    python bench/algorithms.py --json F [--svg F] [--algorithms a,b] [--steps N] [--seeds N] [--keep D]

Runs `meshrl run NAME/quickstart` for each page of algorithms/ that trains a policy, in a separate process with one
thread, one after the other. Results come from summary.json and events.jsonl. The same for all: the initial model, which
sft/quickstart makes once; the task, its held-out words and exact match as the judge; 64 steps; AdamW with the learning
rate of the page's quickstart, which rises for a tenth of the steps and falls linearly to 0; and ROWS completions per
step:

drawn      by algorithms that draw for a reward, and by `distill`. `remax` draws half of them greedily. `online_dpo` and
           `expert_iteration` train on some of them. `multiturn` has this number if each episode takes both turns.
trained    by algorithms that get answers, `sft` and `kto`, and by those of pairs, `dpo` and `spin`, two per prompt.
           `dapo` keeps drawing until it has this number to train on.

The actual numbers are counted and reported. So are the optimizer's updates per step, which depend on the page: four for
`dapo`, `gspo` and `cispo`, two for `ppo`. Pages that get answers see what the others have to find. The teacher of
`distill` is the result of `grpo`. Seconds are those of the whole command, including its start and both evaluations.
`meshrl eval` judges `kto` and `multiturn`: the summary of `kto` covers half of the words, as the other answers count as
bad, and that of `multiturn` covers two tries. About 15 minutes of one core per seed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Final

from bench.harness import ALLOCATOR, ROOT, Figure, figure, report
from meshrl import AlgorithmConfig
from meshrl.events import Call, Event, Step
from meshrl.observe.run_files import read_events
from meshrl.run import find_config, load_job
from meshrl.run.jobs import shipped_scripts

ROWS: Final = 512
"""Completions per step."""
PER_PROMPT: Final = {"dpo": 2, "kto": 1, "multiturn": 16, "remax": 2, "sft": 1, "spin": 2}
"""Completions per prompt, if not `sampling.n`."""
JUDGED: Final = ("kto", "multiturn")
"""Pages whose summary reports the exact match of other words or tries."""
TEACHER: Final = "grpo"
"""The algorithm whose result teaches `distill`."""


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    page: str
    given: bool
    """True if it learns from answers or a teacher, not from a reward."""
    greedy: tuple[float, float]
    """Exact match on held-out words before and after, decoded greedily."""
    sampled: tuple[float, float]
    """The same at temperature 1."""
    drawn: float
    """Completions drawn per step."""
    trained: float
    """Completions trained per step."""
    updates: float
    """Updates of the policy per step."""
    wall: float
    """Seconds of the process."""
    cpu: float
    """CPU seconds of the process."""


@dataclass(frozen=True)
class Row:
    """A page's means over its seeds."""

    page: str
    given: bool
    greedy: tuple[float, float]
    sampled: tuple[float, float]
    lowest: float
    """Lowest greedy exact match after training among the seeds."""
    highest: float
    drawn: float
    trained: float
    updates: float
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures to this file")
    parser.add_argument("--svg", type=Path, metavar="F", help="draw exact match before and after")
    parser.add_argument("--algorithms", metavar="a,b", help="which pages (default: all that train a policy)")
    parser.add_argument("--steps", type=int, default=64, help="steps of each (default: 64)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="D", help="keep the runs' folders here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        start = command(folder, "start", "sft/quickstart")[0]
        runs = partial(measure, folder, start, options.steps)
        names = pages(options.algorithms.split(",") if options.algorithms else None)
        rows = ranked([runs(name, seed) for name in names for seed in range(options.seeds)])
    print(markdown(rows))
    report("algorithms", list(figures(rows)), options.json)
    if options.svg:
        options.svg.write_text(draw(rows), "utf-8")


def pages(asked: Sequence[str] | None) -> list[str]:
    """The requested pages, or all that train a policy from a sampler. A needed teacher comes first.

    `agent` is left out, because its model converses.
    """
    tables = {name: vars(config(name)).keys() for name in sorted(shipped_scripts())}
    found = (name for name, keys in tables.items() if {"policy", "sampler"} <= keys and "agent" not in keys)
    names = list(asked or found)
    return [*([TEACHER] if {TEACHER, "distill"} & {*names} else []), *(name for name in names if name != TEACHER)]


def config(name: str) -> AlgorithmConfig:
    """The settings of a page's quickstart."""
    settings = load_job(find_config(f"{name}/quickstart"), []).config
    assert isinstance(settings, AlgorithmConfig)
    return settings


def measure(folder: Path, start: Path, steps: int, name: str, seed: int) -> Result:
    """Run a page's quickstart with the budget, and read its results."""
    settings: Any = config(name)
    words = [f"policy.model={start / 'model'}", *budget(name, settings, steps), *seeds(seed)]
    if name == "distill":
        words.append(f"teacher.model={folder / f'{TEACHER}-{seed}' / 'model'}")
    run, wall, cpu = command(folder, f"{name}-{seed}", f"{name}/quickstart", *words)
    before, after = exact_match(start, "after"), exact_match(run, "after") if name not in JUDGED else judged(run)
    notes: list[str] = []
    events = read_events(run / "events.jsonl", notes)
    assert not notes, notes
    # In episodes, each turn is a call with one row per episode.
    counts = completions(events, 1 if hasattr(settings, "environment") else settings.sampling.n)
    drawn, trained, updates = (count / steps for count in counts)
    given = not (hasattr(settings, "reward") or hasattr(settings, "environment"))
    greedy, sampled = zip(before, after, strict=True)
    print(f"{name}, seed {seed}: {greedy[0]:.3f} to {greedy[1]:.3f} in {cpu:.0f} s", file=sys.stderr, flush=True)
    return Result(name, given, greedy, sampled, drawn, trained, updates, wall, cpu)


def budget(name: str, settings: Any, steps: int) -> Iterator[str]:
    """The same steps, completions and learning-rate schedule, as overrides of a quickstart."""
    updates = steps * getattr(settings, "epochs", 1) * getattr(settings, "minibatches", 1)
    asked = ROWS // int(PER_PROMPT.get(name) or settings.sampling.n)
    yield f"steps={steps}"
    yield f"{'rows' if hasattr(settings, 'rows') else 'prompts'}={asked}"
    yield "policy.optimizer.schedule=linear"
    yield f"policy.optimizer.total_steps={updates}"
    yield f"policy.optimizer.warmup_steps={updates // 10}"
    if hasattr(settings, "critic"):
        yield f"critic.optimizer.warmup_steps={updates // 10}"
    if getattr(settings, "evaluation", None):  # one word, once: no more than other pages do
        yield "evaluation={every=1000000, rows=1, n=1}"
    if hasattr(settings, "iteration"):  # four opponents, as in the quickstart
        yield f"iteration={max(1, steps // 4)}"


def seeds(seed: int) -> list[str]:
    """Seeds for the order of the words and for sampling."""
    return [f"run.seed={seed}", f"policy.seed={seed}", f"sampler.seed={seed}"]


def command(folder: Path, name: str, *words: str) -> tuple[Path, float, float]:
    """Run `meshrl run`. Returns the run's folder, and the process's wall and CPU seconds."""
    settings = [f"run.folder={folder}", f"run.name={name}", "run.meshes.main.cpus=1"]
    wall, cpu = time.perf_counter(), children()
    meshrl("run", words[0], *settings, *words[1:])
    return folder / name, time.perf_counter() - wall, children() - cpu


def meshrl(*words: str) -> None:
    """Run the command line on one thread."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    path = Path(sys.executable).parent / "meshrl"
    done = subprocess.run(
        [path, *words], check=False, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **ALLOCATOR, **quiet}
    )
    if done.returncode:
        raise SystemExit(f"`meshrl {' '.join(words)}` ended with status {done.returncode}:\n{done.stderr[-4000:]}")


def children() -> float:
    """CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def exact_match(run: Path, when: str) -> tuple[float, float]:
    """Greedy and sampled exact match from a run's summary."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    return summary[f"exact_match_{when}"], summary[f"exact_match_sampled_{when}"]


def judged(run: Path) -> tuple[float, float]:
    """Greedy and sampled exact match by `meshrl eval`."""
    file = run / "eval.json"
    meshrl("eval", str(run), "--reward", "exact_match", "--n", "1", "--out", str(file))
    found = json.loads(file.read_text("utf-8"))
    return found["greedy"]["value"], found["reward"]["value"]


def completions(events: Sequence[Event], n: int) -> tuple[int, int, int]:
    """Numbers of completions drawn, `n` per requested row, of completions trained, and of updates."""
    spans = [(event.began, event.ended) for event in events if isinstance(event, Step)]
    within = [
        event
        for event in events
        if isinstance(event, Call) and spans and spans[0][0] <= event.began <= spans[-1][1] and not event.error
    ]
    drawn = sum(n * (call.rows or 0) for call in within if call.endpoint == "generate")
    updates = [call for call in within if call.endpoint == "update" and call.actor.endswith("Policy")]  # of any backend
    return drawn, sum(call.rows or 0 for call in updates), len(updates)


def ranked(results: Sequence[Result]) -> list[Row]:
    """One row per page with means over seeds, the best first."""

    def mean(values: Iterator[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    rows: list[Row] = []
    for page in dict.fromkeys(result.page for result in results):
        runs = [result for result in results if result.page == page]
        ends = [run.greedy[1] for run in runs]
        rows.append(
            Row(
                page=page,
                given=runs[0].given,
                greedy=(mean(run.greedy[0] for run in runs), mean(iter(ends))),
                sampled=(mean(run.sampled[0] for run in runs), mean(run.sampled[1] for run in runs)),
                lowest=min(ends),
                highest=max(ends),
                drawn=mean(run.drawn for run in runs),
                trained=mean(run.trained for run in runs),
                updates=mean(run.updates for run in runs),
                wall=mean(run.wall for run in runs),
                cpu=mean(run.cpu for run in runs),
            )
        )
    return sorted(rows, key=lambda row: -row.greedy[1])


def figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """The peer of an exact match is that of the initial model."""
    for row in rows:
        yield figure(f"exact match, greedy, {row.page}", row.greedy[1], "of 1", row.greedy[0])
        yield figure(f"exact match, sampled, {row.page}", row.sampled[1], "of 1", row.sampled[0])
        yield figure(f"drawn, {row.page}", row.drawn, "completions/step")
        yield figure(f"trained, {row.page}", row.trained, "completions/step")
        yield figure(f"updates, {row.page}", row.updates, "updates/step")
        yield figure(f"wall, {row.page}", row.wall, "s")
        yield figure(f"CPU, {row.page}", row.cpu, "s")


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/benchmarks.md."""
    lines = [
        "| page | greedy before | after | sampled before | after | drawn | trained | updates | wall, s | CPU, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f" ({row.lowest:.3f} to {row.highest:.3f})" if row.lowest < row.highest else ""
        cells = [f"`{row.page}`", f"{row.greedy[0]:.3f}", f"{row.greedy[1]:.3f}{spread}"]
        cells += [f"{value:.3f}" for value in row.sampled]
        cells += [f"{value:,.0f}" for value in (row.drawn, row.trained, row.updates, row.wall, row.cpu)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .page { fill: #ffffff } .line { stroke: #d0d7de }
.before { fill: #8c959f } .drawn { fill: #0969da } .given { fill: #bf8700 } .range { stroke: #24292f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .page { fill: #0d1117 } .line { stroke: #30363d } .before { fill: #6e7681 }
.drawn { fill: #4493f8 } .given { fill: #d29922 } .range { stroke: #e6edf3 } }
"""
LEFT: Final = 170
WIDE: Final = 400
HIGH: Final = 26
TOP: Final = 62


def draw(rows: Sequence[Row]) -> str:
    """Draw bars as SVG, two per page: greedy exact match before and after, on a light or dark background."""
    width, height = LEFT + WIDE + 150, TOP + HIGH * len(rows) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}"/>',
        *legend(),
    ]
    for tenths in range(0, 11, 2):
        x = LEFT + WIDE * tenths / 10
        parts.append(f'<line class="line" x1="{x:g}" y1="{TOP - 6}" x2="{x:g}" y2="{height - 8}"/>')
        parts.append(f'<text x="{x:g}" y="{TOP - 12}" text-anchor="middle">{tenths / 10:g}</text>')
    parts.append(f'<text x="{width - 12}" y="{TOP - 12}" text-anchor="end">CPU</text>')
    for number, row in enumerate(rows):
        y = TOP + HIGH * number
        before, after, low, high = (WIDE * value for value in (*row.greedy, row.lowest, row.highest))
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(row.page)}</text>',
            f'<rect class="before" x="{LEFT}" y="{y + 2}" width="{before:.1f}" height="6"/>',
            f'<rect class="{kind(row.given)}" x="{LEFT}" y="{y + 8}" width="{after:.1f}" height="12"/>',
            f'<line class="range" x1="{LEFT + low:.1f}" y1="{y + 14}" x2="{LEFT + high:.1f}" y2="{y + 14}"/>',
            f'<text x="{LEFT + max(before, high) + 6:.1f}" y="{y + 18}">{row.greedy[1]:.2f}</text>',
            f'<text x="{width - 12}" y="{y + 18}" text-anchor="end">{row.cpu:.0f} s</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def kind(given: bool) -> str:
    """The class of a bar."""
    return "given" if given else "drawn"


def legend() -> Iterator[str]:
    """Label the colours."""
    told = {"before": "before", "drawn": "after, from a reward", "given": "after, from answers or a teacher"}
    for x, (name, text) in zip((16, 110, 290), told.items(), strict=True):
        yield f'<rect class="{name}" x="{x}" y="12" width="12" height="12"/><text x="{x + 18}" y="23">{text}</text>'


if __name__ == "__main__":
    main()
