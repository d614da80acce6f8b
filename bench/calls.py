"""Microseconds for an empty endpoint call: on the local engine with 2 and 8 ranks, or on Ray with 2 and 4.

    python bench/calls.py --json F [--rounds N] [--engine ray]

One caller, one call after the other, each awaited; the median of all calls of all rounds. `each`: a result of every
rank; `Gather`: an array of one number a rank, joined; `Shard + Gather`: a batch of 8 rows of 4 tokens, split over the
ranks and joined again. The caller's loop is meshrl's, as under `meshrl run`; once it is asyncio's own.

On the local engine, beside it the limit of asyncio: a coroutine that does nothing, run in the loop of one other thread
by `run_coroutine_threadsafe` and awaited. Ranks without a core (`cpus=0`) run in the caller's own loop. A few seconds.

`noted`: with the events of a call and its ranks, which are written to their file at once, not once a second as in a
run: what events cost at most.

On Ray, beside it bare Ray in the same process and on the same cluster: async actors, as many as ranks, awaited with
`asyncio.gather`; ranks and actors reserve no core. Then, in turns:

RankDied             from `os.kill` of one of two ranks, which wait in a call, to the exception in the awaiting task;
                     bare Ray's own error for an actor beside it
start, first answer  from the start of a new process, imports and all, to the answer of 2 ranks; bare Ray's is
                     bench/peers/ray_start.py, with the same options of `ray.init`

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
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from bench.harness import (
    ROOT,
    Figure,
    arguments,
    at_most,
    figure,
    median,
    report,
    start_ray,
    take_turns,
    with_allocator,
    within,
)
from meshrl import Actor, Batch, Gather, LocalEngine, Mesh, Ragged, RankDied, Resources, Shard, each, endpoint
from meshrl.engines.local import RankLoop
from meshrl.events import EventLog, sink
from meshrl.mesh import Engine

CALLS: Final = 200
"""Calls in one turn on the local engine."""
RAY_CALLS: Final = 50
LIMIT: Final = "one thread's loop"
BARE: Final = "bare Ray"
LOOPS: Final = {"": RankLoop, ", asyncio's own loop": asyncio.new_event_loop}
"""How to make the caller's loop, by what a figure's name ends with."""
Call = Callable[[], Awaitable[object]]


class Idle(Actor):
    """Does nothing, in several shapes."""

    @endpoint
    async def nothing(self) -> None:
        """No argument, no result."""

    @endpoint
    async def numbers(self) -> Gather[NDArray[np.int64]]:
        """One number a rank."""
        return np.ones(1, np.int64)

    @endpoint
    async def rows(self, batch: Shard[Batch]) -> Gather[Batch]:
        """The rank's own rows."""
        return batch

    @endpoint
    async def pids(self) -> Gather[NDArray[np.int64]]:
        """The process of each rank."""
        return np.array([os.getpid()])

    @endpoint
    async def wait(self) -> None:
        """For ever."""
        await asyncio.Event().wait()


class BareIdle:
    """The same as an async Ray actor."""

    async def nothing(self) -> None:
        """No argument, no result."""

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def wait(self) -> None:
        """For ever."""
        await asyncio.Event().wait()


class BareMethod(Protocol):
    """A method of a Ray actor."""

    def remote(self) -> Awaitable[object]:
        """Send a call."""
        ...


class BareHandle(Protocol):
    """Ray's handle of a `BareIdle`."""

    nothing: BareMethod
    pid: BareMethod
    wait: BareMethod


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where the ranks run")
    parser.add_argument("--worker", action="store_true", help="be the contestant that starts from nothing")
    options = parser.parse_args()
    if options.worker:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(first_answer())
    elif options.engine == "ray":
        with_allocator()
        report("calls on ray", on_ray(options.rounds), options.json)
    else:
        report("calls", on_threads(options.rounds), options.json)


def on_threads(rounds: int) -> list[Figure]:
    """The local engine's calls."""
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


def on_ray(rounds: int) -> list[Figure]:
    """Ray's calls, deaths and starts."""
    import ray  # noqa: PLC0415 -- an extra, and slow to import

    figures: list[Figure] = []
    start_ray()
    try:
        for suffix, make_loop in LOOPS.items():
            with asyncio.Runner(loop_factory=make_loop) as runner:
                times = runner.run(measure_ray(rounds, empty_only=bool(suffix)))
            for ranks in (2, 4):
                bare = times.pop(f"{BARE}, {ranks} ranks")
                name = f"nothing, {ranks} ranks"
                figures.append(within(name + suffix, times.pop(name), "us", bare, 1.2))
                rest = {name: value for name, value in times.items() if f", {ranks} ranks" in name}
                figures += [figure(name, value, "us", bare) for name, value in rest.items()]
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            engine = ray_engine()
            deaths = {"": lambda: runner.run(death(engine)), BARE: lambda: runner.run(bare_death())}
            died = {name: median(values) for name, values in take_turns(deaths, max(3, rounds // 3)).items()}
            runner.run(engine.close())
    finally:
        ray.shutdown()
    figures.append(at_most("SIGKILL to RankDied", died[""], "ms", target=100, peer=died[BARE]))
    return [*figures, starts(max(3, rounds // 3))]


def ray_engine() -> Engine:
    """On the Ray of this process, or on one of its own where there is none."""
    from meshrl.engines.ray import RayEngine  # noqa: PLC0415 -- slow to import, as above

    return RayEngine()


async def measure_ray(rounds: int, *, empty_only: bool) -> dict[str, float]:
    """Microseconds of a call, by what was called."""
    engine = ray_engine()
    calls: dict[str, Call] = {}
    bare = {ranks: bare_actors(ranks) for ranks in (2, 4)}
    for ranks, actors in bare.items():
        mesh = await Mesh.reserve(engine, ranks, Resources(cpus=0))
        idle = await mesh.spawn(Idle)
        label = f"{ranks} ranks"
        calls |= {f"nothing, {label}": idle.nothing} if empty_only else variants(idle, label)
        calls[f"{BARE}, {label}"] = partial(everyone, [actor.nothing for actor in actors])
    with event_log() as log:
        if not empty_only:
            calls |= {f"{name}, noted": partial(noted, call, log) for name, call in calls.items() if "nothing" in name}
        times = await timed(calls, rounds, RAY_CALLS)
    await engine.close()
    return times


def bare_actors(count: int) -> list[BareHandle]:
    """Async Ray actors, without a core."""
    import ray  # noqa: PLC0415 -- as above

    made = ray.remote(BareIdle).options(num_cpus=0, max_concurrency=1000)
    return [cast("BareHandle", made.remote()) for _ in range(count)]


async def everyone(methods: Sequence[BareMethod]) -> None:
    """One call of each actor."""
    await asyncio.gather(*(method.remote() for method in methods))


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

    actors = bare_actors(2)
    pids = await asyncio.gather(*(actor.pid.remote() for actor in actors))
    waiting = asyncio.gather(*(actor.wait.remote() for actor in actors))
    return await until(RayActorError, waiting, cast("int", pids[1]))


async def until(error: type[Exception], waiting: Awaitable[object], pid: int) -> float:
    """Milliseconds from the kill of a process to the error in what waits for it."""
    await asyncio.sleep(0.3)  # so that the call has begun
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(error):
        await waiting
        raise AssertionError(f"process {pid} was killed, and its call returned")
    return (time.perf_counter() - began) * 1e3


def starts(rounds: int) -> Figure:
    """Seconds from nothing to the first answer, here and with bare Ray."""
    contestants = {
        "meshrl": partial(start, [sys.executable, ROOT / "bench/calls.py", "--worker"]),
        BARE: partial(start, [sys.executable, ROOT / "bench/peers/ray_start.py"]),
    }
    times = {name: median(values) for name, values in take_turns(contestants, rounds).items()}
    return within("start to first answer, 2 ranks", times["meshrl"], "s", times[BARE], 1.2)


def start(command: Sequence[str | Path]) -> float:
    """Seconds until a process writes that it was answered."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answered = any(line.startswith("{") for line in process.stdout)
        took = time.perf_counter() - began
    if process.returncode or not answered:
        raise SystemExit(f"{command} ended with status {process.returncode}; its own message is above")
    return took


async def first_answer() -> None:
    """Be the contestant meshrl: from nothing to the first answer of 2 ranks."""
    engine = ray_engine()
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=1))
    idle = await mesh.spawn(Idle)
    await idle.nothing()
    print('{"answered": true}', flush=True)
    await engine.close()


def variants(idle: Idle, label: str) -> dict[str, Call]:
    """What is called of an actor."""
    rows = Batch.of(tokens=Ragged.of([[1, 2, 3, 4]] * 8, np.int32))
    return {
        f"nothing, {label}": idle.nothing,
        f"each, {label}": each(idle.nothing),
        f"Gather, {label}": idle.numbers,
        f"Shard + Gather, {label}": lambda: idle.rows(rows),
    }


async def timed(calls: Mapping[str, Call], rounds: int, count: int) -> dict[str, float]:
    """Microseconds of each call, the median of all turns but the first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            took = await turn(calls[name], count)
            times[name] += took if number else []  # the first round warms up
    return {name: median(values) for name, values in times.items()}


async def turn(call: Call, count: int) -> list[float]:
    """Microseconds of each of so many calls."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter_ns()
        await call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return times


@contextlib.contextmanager
def event_log() -> Generator[EventLog]:
    """A log in a file that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        yield log
        log.close()


async def noted(call: Call, log: EventLog) -> None:
    """The call, with its events written."""
    outer = sink.set(log)
    await call()
    log.flush()
    sink.reset(outer)


async def empty() -> None:
    """What the limit runs."""


if __name__ == "__main__":
    main()
