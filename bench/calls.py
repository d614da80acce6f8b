"""Microseconds of an empty endpoint call: on the local engine with 2 and 8 ranks, in processes with 2 and 4.

    python bench/calls.py --json F [--rounds N] [--engine processes|ray]

One caller awaits one call after the other. The median of all calls of all rounds counts. `each`: a result of every
rank. `Gather`: an array with one number per rank, joined. `Shard + Gather`: a batch of 8 rows of 4 tokens, split over
the ranks and joined again. The caller's loop is meshrl's, as under `meshrl run`; one figure uses asyncio's own.

The limit for the local engine is asyncio: a coroutine that does nothing, run in the loop of another thread by
`run_coroutine_threadsafe` and awaited. Ranks without a core (`cpus=0`) run in the caller's own loop. A few seconds.

`noted`: with the events of a call and its ranks, written to their file at once instead of once per second. This is the
highest cost of events.

The engines `processes` and `ray` are compared in turns with:

bare Ray      as many async actors as ranks, awaited with `asyncio.gather`, called from the same process. Ranks and
              actors reserve no core
bare sockets  the limit: as many processes as ranks, which send a few bytes back over Unix sockets, to a caller that
              sends to all and waits for all (bench/peers/socket_pong.py). "in loops": the same with asyncio's
              add_reader at both ends, the limit if other tasks run too
bare frames   the frames of an empty call in such loops, encoded and decoded by meshrl, and answered as they arrive:
              the limit with meshrl's messages (bench/peers/frame_pong.py)
bare rows     the same with the rows of `Shard + Gather`, as plain arrays that are pickled: divided by tokens, and
              joined in order

Then, also in turns:

RankDied             from `os.kill` of one of two ranks, which wait in a call, to the exception in the awaiting task.
                     The peer is bare Ray's own error for an actor
start, first answer  from the start of a new process, including imports, to the answer of 2 ranks: meshrl_start.py and
                     ray_start.py in bench/peers, the latter with the engine's options of `ray.init`

About 3 minutes.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from bench.harness import (
    ROOT,
    Figure,
    arguments,
    at_least,
    at_most,
    figure,
    median,
    report,
    start_ray,
    take_turns,
    with_allocator,
    within,
)
from bench.peers.frame_pong import FramePongs
from bench.peers.socket_pong import Pongs
from meshrl import Actor, Batch, Gather, LocalEngine, Mesh, Ragged, Resources, Shard, each, endpoint
from meshrl.engines import make_engine
from meshrl.engines.local import RankLoop
from meshrl.errors import RankDied
from meshrl.events import EventLog, sink
from meshrl.mesh import Engine

CALLS: Final = 200
"""Calls per turn on the local engine."""
HOSTED_CALLS: Final = 50
"""Calls per turn in processes, where bare Ray has turns too."""
RANKS: Final = (2, 4)
"""Numbers of ranks in processes."""
MOST: Final = {2: 250, 4: 400}
"""Allowed microseconds of an empty call on the engine `processes`, by number of ranks."""
LIMIT: Final = "one thread's loop"
BARE: Final = "bare Ray"
SOCKETS: Final = "bare sockets"
LOOPED: Final = "bare sockets in loops"
FRAMES: Final = "bare frames"
ROWS: Final = "bare rows"
LOOPS: Final = {"": RankLoop, ", asyncio's own loop": asyncio.new_event_loop}
"""Factories of the caller's loop, by the suffix of the figure's name."""
PLAIN: Final = np.arange(32, dtype=np.int32), 4 * np.arange(9), np.arange(8)
"""The rows of `Shard + Gather` as arrays: tokens, offsets, and the rows' numbers."""
Call = Callable[[], Awaitable[object]]


class Idle(Actor):
    """Does nothing, in several shapes."""

    @endpoint
    async def nothing(self) -> None:
        """No argument, no result."""

    @endpoint
    async def numbers(self) -> Gather[NDArray[np.int64]]:
        """Return one number per rank."""
        return np.ones(1, np.int64)

    @endpoint
    async def rows(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Return the rank's rows."""
        return batch

    @endpoint
    async def pids(self) -> Gather[NDArray[np.int64]]:
        """Return the process of each rank."""
        return np.array([os.getpid()])

    @endpoint
    async def wait(self) -> None:
        """Wait forever."""
        await asyncio.Event().wait()


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--engine", choices=("local", "processes", "ray"), default="local", help="where the ranks run")
    options = parser.parse_args()
    if options.engine == "local":
        report("calls", on_threads(options.rounds), options.json)
    else:
        with_allocator()
        report(f"calls on {options.engine}", in_processes(options.engine, options.rounds), options.json)


def on_threads(rounds: int) -> list[Figure]:
    """Measure the local engine's calls."""
    figures: list[Figure] = []
    for suffix, make_loop in LOOPS.items():
        with asyncio.Runner(loop_factory=make_loop) as runner:
            times = runner.run(measure_threads(rounds))
        limit = times.pop(LIMIT)
        for name, value in times.items():
            if name == "nothing, 2 ranks":
                figures.append(at_most(name + suffix, value, "us", target=100, peer=limit))
            elif not suffix:
                figures.append(figure(name, value, "us", limit))
    return figures


async def measure_threads(rounds: int) -> dict[str, float]:
    """Microseconds of a call, by what was called."""
    engine = LocalEngine()
    calls: dict[str, Call] = {}
    for cpus, suffix in ((1, ""), (0, " without a core")):
        for ranks in (2, 8):
            mesh = await Mesh.reserve(engine, ranks, Resources(cpus=cpus))
            calls |= variants(await mesh.spawn(Idle), f"{ranks} ranks{suffix}")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    calls[LIMIT] = lambda: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(empty(), loop))
    with event_log() as log:
        calls |= {f"{name}, noted": partial(noted, call, log) for name, call in calls.items() if "nothing" in name}
        times = await timed(calls, rounds, CALLS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    await engine.close()
    return times


def in_processes(name: str, rounds: int) -> list[Figure]:
    """Measure calls, deaths and starts of an engine whose ranks are processes."""
    import ray  # noqa: PLC0415 -- an extra, and slow to import

    few = max(3, rounds // 3)
    figures: list[Figure] = []
    start_ray()
    try:
        for suffix, make_loop in LOOPS.items():
            with asyncio.Runner(loop_factory=make_loop) as runner:
                times = runner.run(measure_processes(name, rounds, empty_only=bool(suffix)))
            for ranks in RANKS:
                ours = {key: value for key, value in times.items() if f", {ranks} ranks" in key}
                bare, sockets = (ours.pop(f"{peer}, {ranks} ranks") for peer in (BARE, SOCKETS))
                limits = {peer: ours.pop(f"{peer}, {ranks} ranks") for peer in (LOOPED, FRAMES, ROWS)}
                figures += compare(name, ranks, suffix, ours, bare, sockets)
                if (sharded := f"Shard + Gather, {ranks} ranks") in ours:
                    figures.append(figure(f"{sharded}, against {ROWS}", ours[sharded], "us", limits[ROWS]))
                figures += [figure(f"{it}, {ranks} ranks{suffix}", took, "us", sockets) for it, took in limits.items()]
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            engine = make_engine(name)
            deaths = {"": lambda: runner.run(death(engine)), BARE: lambda: runner.run(bare_death())}
            died = {who: median(values) for who, values in take_turns(deaths, few).items()}
            runner.run(engine.close())
    finally:
        ray.shutdown()
    most = 20 if name == "processes" else 100
    figures.append(at_most("SIGKILL to RankDied", died[""], "ms", target=most, peer=died[BARE]))
    return [*figures, starts(name, few)]


def compare(
    engine: str, ranks: int, suffix: str, ours: Mapping[str, float], bare: float, sockets: float
) -> list[Figure]:
    """Compare the calls of a number of ranks with their peer and their limit, in microseconds."""
    name, sharded = (f"{kind}, {ranks} ranks" for kind in ("nothing", "Shard + Gather"))
    call = ours[name]
    limit = f"{name}{suffix}, against {SOCKETS}", call, "us", sockets
    if engine == "ray":
        rest = [figure(key, value, "us", bare) for key, value in ours.items() if key != name]
        return [within(name + suffix, call, "us", bare, 1.2), figure(*limit), *rest]
    speed = f"speed, {name}{suffix}, against {BARE}", 1e6 / call, "calls/s", 1e6 / bare
    if suffix:
        return [figure(*limit), figure(*speed)]
    return [
        at_most(name, call, "us", target=MOST[ranks]),
        within(*limit, target=2),
        at_least(*speed, target=5),
        within(f"{sharded}, against nothing", ours[sharded], "us", call, 2),
        *(figure(key, value, "us", bare) for key, value in ours.items() if key not in (name, sharded)),
    ]


async def measure_processes(name: str, rounds: int, *, empty_only: bool) -> dict[str, float]:
    """Microseconds of a call, by what was called."""
    from bench.peers.ray_idle import bare_actors, everyone  # noqa: PLC0415 -- as above

    engine = make_engine(name)
    calls: dict[str, Call] = {}
    with contextlib.ExitStack() as stack:
        for ranks in RANKS:
            mesh = await Mesh.reserve(engine, ranks, Resources(cpus=0))
            idle = await mesh.spawn(Idle)
            label = f"{ranks} ranks"
            calls |= {f"nothing, {label}": idle.nothing} if empty_only else variants(idle, label)
            calls[f"{BARE}, {label}"] = partial(everyone, [actor.nothing for actor in bare_actors(ranks)])
            calls[f"{SOCKETS}, {label}"] = partial(pinged, stack.enter_context(Pongs(ranks)))
            calls[f"{LOOPED}, {label}"] = stack.enter_context(Pongs(ranks, looped=True)).ping_in_loop
            frames = stack.enter_context(FramePongs(ranks))
            calls[f"{FRAMES}, {label}"] = frames.ping
            calls[f"{ROWS}, {label}"] = partial(frames.echo, PLAIN)
        log = stack.enter_context(event_log())
        if not empty_only:
            calls |= {f"{key}, noted": partial(noted, call, log) for key, call in calls.items() if "nothing" in key}
        times = await timed(calls, rounds, HOSTED_CALLS)
    await engine.close()
    return times


async def pinged(pongs: Pongs) -> None:
    """The limit. Blocking, because this loop has nothing else to do."""
    pongs.ping()


async def death(engine: Engine) -> float:
    """Milliseconds from a kill to `RankDied`."""
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    idle = await mesh.spawn(Idle)
    pids = await idle.pids()
    took = await until(RankDied, asyncio.ensure_future(idle.wait()), int(pids[1]))
    await mesh.stop()
    return took


async def bare_death() -> float:
    """Milliseconds from a kill to Ray's error."""
    from ray.exceptions import RayActorError  # noqa: PLC0415 -- as above

    from bench.peers.ray_idle import bare_actors  # noqa: PLC0415 -- as above

    actors = bare_actors(2)
    pids = await asyncio.gather(*(actor.pid.remote() for actor in actors))
    waiting = asyncio.gather(*(actor.wait.remote() for actor in actors))
    return await until(RayActorError, waiting, cast("int", pids[1]))


async def until(error: type[Exception], waiting: Awaitable[object], pid: int) -> float:
    """Milliseconds from the kill of a process to the error in the task that waits for it."""
    await asyncio.sleep(0.3)  # let the call begin
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(error):
        await waiting
        raise AssertionError(f"process {pid} was killed, and its call returned")
    return (time.perf_counter() - began) * 1e3


def starts(name: str, rounds: int) -> Figure:
    """Seconds from the start to the first answer, here and with bare Ray."""
    peers = ROOT / "bench/peers"
    contestants = {
        "meshrl": partial(start, [sys.executable, peers / "meshrl_start.py", name]),
        BARE: partial(start, [sys.executable, peers / "ray_start.py"]),
    }
    times = {who: median(values) for who, values in take_turns(contestants, rounds).items()}
    what, ours, bare = "start to first answer, 2 ranks", times["meshrl"], times[BARE]
    return within(what, ours, "s", bare, 1.1) if name == "ray" else at_most(what, ours, "s", target=0.4, peer=bare)


def start(command: Sequence[str | Path]) -> float:
    """Seconds until a process reports its first answer. Imports are precompiled, as after `pip install`."""
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=compiled) as process:
        assert process.stdout is not None
        answered = any(line.startswith("{") for line in process.stdout)
        took = time.perf_counter() - began
    if process.returncode or not answered:
        raise SystemExit(f"{command} ended with status {process.returncode}; its own message is above")
    return took


def variants(idle: Idle, label: str) -> dict[str, Call]:
    """The calls to measure on an actor."""
    rows = Batch.of(tokens=Ragged.of([[1, 2, 3, 4]] * 8, np.int32))
    return {
        f"nothing, {label}": idle.nothing,
        f"each, {label}": each(idle.nothing),
        f"Gather, {label}": idle.numbers,
        f"Shard + Gather, {label}": lambda: idle.rows(rows),
    }


async def timed(calls: Mapping[str, Call], rounds: int, count: int) -> dict[str, float]:
    """Microseconds of each call: the median of all turns except the first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            took = await turn(calls[name], count)
            times[name] += took if number else []  # the first round warms up
    return {name: median(values) for name, values in times.items()}


async def turn(call: Call, count: int) -> list[float]:
    """Microseconds of each of `count` calls."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter_ns()
        await call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return times


@contextlib.contextmanager
def event_log() -> Generator[EventLog]:
    """A log in a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        yield log
        log.close()


async def noted(call: Call, log: EventLog) -> None:
    """Make the call and write its events."""
    outer = sink.set(log)
    await call()
    log.flush()
    sink.reset(outer)


async def empty() -> None:
    """What the limit runs."""


if __name__ == "__main__":
    main()
