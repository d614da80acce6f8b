"""Rows that pass through the controller, in milliseconds, against verl, bare shared memory, and copies of the bytes.

    python bench/roundtrip.py --mib 128 --json F [--rounds N] [--engine processes|ray] [--without verl]

Two ranks make a batch. The controller loads all columns, reads every byte (the last figure is the cost of this alone),
and replaces one column or all of them by prepared arrays. It shards the batch over the same ranks, which read every
byte. Rows, checks, processes and turns are as in bench/handoff.py. The reference is two copies of all bytes by one
thread into warm memory, measured in the same run. The limit is the same way through bare shared memory
(bench/peers/shared_rows.py). verl needs `make peers`; `--without verl` leaves it out. About 3 minutes.
"""

import contextlib
from collections.abc import Mapping
from functools import partial

from bench.handoff import prepare, project, warming
from bench.harness import (
    Figure,
    Worker,
    add_engine,
    arguments,
    at_least,
    copier,
    figure,
    median,
    report,
    take_turns,
    within,
)
from bench.peers.payload import COLUMNS
from bench.peers.shared_rows import SharedRows

VERL_WAYS = ("default", "numpy", "nd", "tensordict")
REPLACED = {"one column replaced": ("versions",), "all columns replaced": tuple(COLUMNS)}
BARE = "bare shared memory"
FASTER = {"one column replaced": 2.5, "all columns replaced": 2.0}
"""Targets of the speed-up over verl's best."""
MOST = {"one column replaced": 1.5}
"""Allowed time in units of two copies."""


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--mib", default="128", help="sizes of the batch in MiB (default: 128)")
    parser.add_argument("--without", choices=("verl",), help="the peer that is left out")
    add_engine(parser)
    options = parser.parse_args()
    names = [name for name in ("meshrl", "verl") if name != options.without]
    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(project(name, options.engine)) for name in names}
        for mib in map(int, options.mib.split(",")):
            with SharedRows(mib) as bare:
                figures += compare(mib, workers, bare, options.rounds)
    report(f"roundtrip on {options.engine}", figures, options.json)


def compare(mib: int, workers: Mapping[str, Worker], bare: SharedRows, rounds: int) -> list[Figure]:
    """Send rows of one size there and back, in turns."""
    mebibytes = prepare(mib, workers)
    ours, ways = workers["meshrl"], VERL_WAYS if "verl" in workers else ()
    copy = copier(round(mebibytes * 2**20))
    turns = {"two copies": lambda: copy() + copy(), "reading": lambda: ours.ask(do="reading")["value"]}
    for label, replaced in REPLACED.items():
        turns[label] = partial(seconds, ours, replaced=replaced)
        turns[f"{label}, {BARE}"] = partial(bare.roundtrip, replaced)
        for way in ways:
            turns[f"{label}, {way}"] = partial(seconds, workers["verl"], replaced=replaced, how=way)
    take_turns(turns, warming(mib))
    times = {name: median(values) for name, values in take_turns(turns, rounds).items()}
    copies, figures = times["two copies"], list[Figure]()
    for label in REPLACED:
        wall = times[label]
        peers = {way: times[f"{label}, {way}"] for way in ways}
        name = f"{mib} MiB, {label}"
        if peers:
            best = mebibytes / min(peers.values())
            figures.append(
                at_least(f"speed, {name}, against verl's best", mebibytes / wall, "MiB/s", best, FASTER[label])
            )
        against = (f"wall, {name}, against two copies", wall * 1e3, "ms", copies * 1e3)
        figures.append(within(*against, target=MOST[label]) if label in MOST else figure(*against))
        limit = times[f"{label}, {BARE}"]
        figures.append(figure(f"wall, {name}, against {BARE}", wall * 1e3, "ms", limit * 1e3))
        figures.append(figure(f"{BARE}, {name}, against two copies", limit * 1e3, "ms", copies * 1e3))
        figures += [
            figure(f"wall, {name}, against verl, {way}", wall * 1e3, "ms", peer * 1e3) for way, peer in peers.items()
        ]
    alone = figure(f"reading alone, {mib} MiB, against two copies", times["reading"] * 1e3, "ms", copies * 1e3)
    return [*figures, alone]


def seconds(worker: Worker, **question: object) -> float:
    """Seconds of one round trip."""
    return worker.ask(do="roundtrip", **question)["value"]


if __name__ == "__main__":
    main()
