"""A benchmark of two commits, which take turns: what a change of the product costs or brings.

    python bench/against.py --peer FOLDER --json F [--rounds N] calls --engine processes --rounds 2

The words after the options are a benchmark's name and its own options. `--peer`: a checkout of the other commit with
its environment (`make setup`). Each turn runs the benchmark of one of the two, as it is at that commit. A figure that
both have is shown with the median of the other commit's as its peer. Whether more is better depends on its unit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from bench.harness import ROOT, Figure, arguments, figure, median, report, take_turns

Measured = dict[str, tuple[float, str]]
"""A benchmark's values and units, by the figure's name."""


def main() -> None:
    """Run a benchmark in both checkouts in turns, and compare the medians."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("bench", help="a benchmark's name, such as calls")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its own options")
    args = parser.parse_args()
    folders = {"here": ROOT, "peer": args.peer.resolve()}
    turns = take_turns(
        {name: partial(measured, folder, args.bench, args.options) for name, folder in folders.items()}, args.rounds
    )
    report(f"against, {args.bench}", compared(turns["here"], turns["peer"]), args.json)


def measured(folder: Path, bench: str, options: Sequence[str]) -> Measured:
    """Run the benchmark of a checkout. SystemExit with its last output if it fails."""
    with tempfile.TemporaryDirectory() as there:
        written = Path(there, "figures.json")
        python = Path(sys.executable) if folder == ROOT else folder / ".venv/bin/python"
        command = [str(word) for word in (python, folder / f"bench/{bench}.py", "--json", written, *options)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{bench} of {folder} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
        figures = cast("list[dict[str, object]]", json.loads(written.read_text())["figures"])
    return {str(each["name"]): (float(str(each["value"])), str(each["unit"])) for each in figures}


def compared(here: Sequence[Measured], peer: Sequence[Measured]) -> list[Figure]:
    """Return the figures that both have, each with the median of its turns."""
    return [
        figure(name, median([turn[name][0] for turn in here]), unit, median([turn[name][0] for turn in peer]))
        for name, (_, unit) in here[0].items()
        if all(name in turn for turn in (*here, *peer))
    ]


if __name__ == "__main__":
    main()
