"""Run mutants against the longer and the shorter tests, and compare: `python tests/mutants/run.py --report`.

    python tests/mutants/run.py --suite after --jobs 2
    python tests/mutants/run.py --suite before

A drawn mutant first meets the tests that run its line and start no process, as coverage.py has recorded once (`pip
install coverage`). If it survives, and if it was planted by hand, it meets the tests that `suites.json` names for its
room. `results.json` keeps what killed it. Mutants in there are not run again without `--again`. One that the shorter
tests kill is not run against the longer ones, which take hours, and counts as killed by them too. One whose `reason`
says that it is equivalent is killed by neither. Both run as they were at the revisions in `tree.py`, on a product that
has been moved since. The later revision has `tests/mutants/draw.py`, which drew them by a fixed seed.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import IO, Final, cast

from tests.mutants.mutant import HERE, ROOMS, Mutant, mutants
from tests.mutants.tree import Suite, Tree
from tests.mutants.warm import Outcome

Results = dict[str, dict[str, str]]
"""By mutant, what killed it `before` and `after`, and of a survivor the `reason`."""
RESULTS: Final = HERE / "results.json"
SURVIVED: Final = "survived"
_SHORT, _LONG = 60.0, 300.0
"""Seconds that a test may take: one that starts no process, and any other."""
_QUICK, _BUDGET = 5.0, 45.0
"""Seconds of a test that runs a line, and of all that are tried, as they took when lines were recorded."""
_one_at_a_time: Final = Lock()


class Bench:
    """A tree with a warm process, for one mutant at a time."""

    def __init__(self, suite: Suite, cache: Path, number: int) -> None:
        self._suite, self._tree, self._temporary = suite, Tree(suite, cache, number), cache / f"tmp-{suite}-{number}"
        self._known = cache / f"{self._tree.version}.json"
        self._plain, self._wrong = Outcome(), list[str]()
        self._suites: dict[str, list[str]] = json.loads((HERE / "suites.json").read_text())
        self._warm = subprocess.Popen(
            [self._tree.folder / ".venv/bin/python", "-P", HERE / "warm.py", cache / f"{suite}-{number}.news"],
            cwd=self._tree.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=(cache / f"{suite}-{number}.log").open("w"), env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )  # fmt: skip

    def killer(self, mutant: Mutant) -> str:
        """Return what kills a mutant, or that it survives."""
        named, failed = self._suites[mutant.room], list[str]()
        if mutant.room in ROOMS and (tests := self._of_line(mutant)):
            with self._tree.holding(mutant):
                failed = self._run(["-x", *tests])["failed"]
        while named and not failed:
            options = ["-x", *(f"--deselect={test}" for test in self._wrong)]
            with self._tree.holding(mutant):
                failed = self._run(options, named, silence=_LONG)["failed"]
            test = failed[0].rpartition(", in ")[2] if failed else ""
            if "::" not in test or not self._run([test], silence=_LONG)["failed"]:
                break
            self._wrong.append(test)
            failed = []
        return failed[0] if failed else SURVIVED

    def _of_line(self, mutant: Mutant) -> list[str]:
        """Return the quickest tests that run a mutant's lines. If only imports do, those that run any of its file."""
        known = self._plain = self._recorded()
        lines = known["lines"].get(self._tree.place(mutant.file), {})
        changed = range(mutant.line, mutant.line + len(mutant.old))
        found = {*chain(*(lines.get(str(line), []) for line in changed))} or {*chain(*lines.values())}
        quick = ((seconds, test) for test, seconds in known["passed"].items() if seconds < _QUICK)
        quickest = sorted(each for each in quick if each[1] in found)
        sums = accumulate(seconds for seconds, _ in quickest)
        return [test for (_, test), total in zip(quickest, sums, strict=True) if total < _BUDGET]

    def _recorded(self) -> Outcome:
        """Return how the tests that start no process end without a mutant, and what each runs. They are run once."""
        with _one_at_a_time:
            if not self._known.exists():
                places = [self._tree.folder / self._tree.place(path) for path in ROOMS.values()]
                rooms = [str(place if place.suffix else place / "*") for place in places]
                _write(self._known, self._run([], self._suites["in process"], rooms))
            return self._plain or cast("Outcome", json.loads(self._known.read_text()))

    def _run(
        self, options: Sequence[str], paths: Sequence[str] = (), lines: Sequence[str] = (), silence: float = _SHORT
    ) -> Outcome:
        there = [str(each) for path in paths for each in sorted(self._tree.folder.glob(path))]
        kinds = ["not gpu", "not vllm", "not sglang", *(["not process", "not slow"] if lines else [])]
        told = ["-q", "-m", " and ".join([*kinds, *(["not wide"] if self._suite == "after" else [])])]
        told += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        job = [*told, f"--basetemp={self._temporary}", *options, *there], lines, silence
        print(json.dumps(job), file=self._warm.stdin, flush=True)
        return cast("Outcome", json.loads(cast("IO[str]", self._warm.stdout).readline()))


def _write(path: Path, content: object) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    fresh.rename(path)


def results() -> Results:
    return cast("Results", json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def run(suite: Suite, wanted: Sequence[Mutant], cache: Path, jobs: int) -> None:
    """Run mutants, and keep each result as it comes."""
    benches: SimpleQueue[Bench] = SimpleQueue()
    for number in range(jobs):
        benches.put(Bench(suite, cache, number))

    def work(mutant: Mutant) -> None:
        bench = benches.get()
        killer = bench.killer(mutant)
        benches.put(bench)
        print(f"{mutant.id}: {killer}", flush=True)
        with _one_at_a_time:
            known = results()
            known.setdefault(mutant.id, {})[suite] = killer
            _write(RESULTS, known)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(work, wanted))


def report(found: Sequence[Mutant], known: Results) -> Iterator[str]:
    """Yield the kills of both suites by room, and what survives the later one. At last what is wrong."""
    own = [(each, known.get(each.id, {})) for each in found]
    before, after = 0, 0
    yield f"{'':12}{'mutants':>8}{'killed before':>15}{'of them not run':>17}{'killed after':>15}"
    for room in (*dict.fromkeys(each.room for each in found), "all"):
        here = [told for each, told in own if room in (each.room, "all")]
        before, after = (sum(_killed(suite, told) for told in here) for suite in ("before", "after"))
        unknown = sum("before" not in told and _killed("before", told) for told in here)
        yield f"{room:12}{len(here):8}{before:15}{unknown:17}{after:15}"
    for mutant, told in own:
        if told.get("after") == SURVIVED:
            yield f"\n{mutant.id}: before {told.get('before', 'not run')}, after {told.get('after', 'not run')}"
            yield from (f"  - {line.strip()}" for line in mutant.old)
            yield from (f"  + {line.strip()}" for line in mutant.new)
            yield f"  {told.get('reason', 'no reason is given yet')}"
    if missing := sum(any(_has_to_run(suite, told) for suite in ("before", "after")) for _, told in own):
        yield f"WRONG: {missing} mutants are still to be run"
    if after < before:
        yield "WRONG: fewer mutants are killed than before"


def _killed(suite: str, known: dict[str, str]) -> bool:
    return known.get(suite, known.get("after", SURVIVED)) != SURVIVED


def _has_to_run(suite: str, known: dict[str, str]) -> bool:
    is_equivalent = known.get("reason", "").startswith("equivalent")
    return suite not in known and (suite == "after" or not (_killed("after", known) or is_equivalent))


def main() -> None:
    parser = ArgumentParser(description="Mutants of the product, and the tests that kill them.")
    parser.add_argument("--suite", choices=["before", "after"], help="run mutants against these tests")
    parser.add_argument("--only", nargs="*", default=[""], help="those of a room, or whose id has a text")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--again", action="store_true", help="also those whose result is known")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "meshrl-mutants"))
    parser.add_argument("--report", action="store_true", help="compare the two suites")
    told, found, known = parser.parse_args(), mutants(), results()
    if told.suite:
        left = [each for each in found if told.again or _has_to_run(told.suite, known.get(each.id, {}))]
        named = [each for each in left if any(text in f"{each.room} {each.id}" for text in told.only)]
        told.cache.mkdir(parents=True, exist_ok=True)
        run(told.suite, named, told.cache.resolve(), told.jobs)
    if told.report:
        lines = list(report(found, results()))
        print("\n".join(lines))
        sys.exit(any(line.startswith("WRONG") for line in lines))


if __name__ == "__main__":
    main()
