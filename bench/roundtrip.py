"""Rows that come to the controller and go back, in milliseconds, against verl and against copies of the same bytes.

    python bench/roundtrip.py --mib 128 --json F [--rounds N]

Two ranks make a batch; the controller loads all columns, reads every byte (what that alone costs is the last figure),
replaces one column, or all of them, by arrays that lie ready, and shards the batch over the same ranks, which read
every byte. Rows, checks, processes and turns as in bench/handoff.py. The copies are of one thread into warm memory,
two of all bytes, measured in the same run. verl needs `make peers`. About 3 minutes.
"""

import contextlib
from functools import partial

from bench.handoff import prepare, project, warming
from bench.harness import Figure, Worker, arguments, at_least, copier, figure, median, report, take_turns, within
from bench.peers.payload import COLUMNS

VERL_WAYS = ("default", "numpy", "nd", "tensordict")
REPLACED = {"one column replaced": ("versions",), "all columns replaced": tuple(COLUMNS)}


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--mib", default="128", help="sizes of the batch in MiB (default: 128)")
    options = parser.parse_args()
    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        ours, verl = (stack.enter_context(project(name)) for name in ("meshrl", "verl"))
        for mib in map(int, options.mib.split(",")):
            figures += compare(mib, ours, verl, options.rounds)
    report("roundtrip", figures, options.json)


def compare(mib: int, ours: Worker, verl: Worker, rounds: int) -> list[Figure]:
    """Let rows of one size come and go, in turns."""
    mebibytes = prepare(mib, {"meshrl": ours, "verl": verl})
    copy = copier(round(mebibytes * 2**20))
    turns = {"two copies": lambda: copy() + copy(), "reading": lambda: ours.ask(do="reading")["value"]}
    for label, replaced in REPLACED.items():
        turns[label] = partial(seconds, ours, replaced=replaced)
        for way in VERL_WAYS:
            turns[f"{label}, {way}"] = partial(seconds, verl, replaced=replaced, how=way)
    take_turns(turns, warming(mib))
    times = {name: median(values) for name, values in take_turns(turns, rounds).items()}
    copies, figures = times["two copies"], list[Figure]()
    for label in REPLACED:
        wall = times[label]
        best = min(times[f"{label}, {way}"] for way in VERL_WAYS)
        name = f"{mib} MiB, {label}"
        figures.append(at_least(f"speed, {name}", mebibytes / wall, "MiB/s", mebibytes / best, 3))
        figures.append(within(f"wall, {name}, against two copies", wall * 1e3, "ms", copies * 1e3, 4))
        figures += [
            figure(f"wall, {name}, against verl, {way}", wall * 1e3, "ms", times[f"{label}, {way}"] * 1e3)
            for way in VERL_WAYS
        ]
    alone = figure(f"reading alone, {mib} MiB, against two copies", times["reading"] * 1e3, "ms", copies * 1e3)
    return [*figures, alone]


def seconds(worker: Worker, **question: object) -> float:
    """Of one round trip."""
    return worker.ask(do="roundtrip", **question)["value"]


if __name__ == "__main__":
    main()
