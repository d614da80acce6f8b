"""The explorer: runs a scenario under thousands of interleavings, each reproducible from a seed.

python -m meshrl.testing FILE.py:SCENARIO --seed 1234
"""

import asyncio
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeAlias, cast

import structlog

from meshrl import log
from meshrl.errors import ConfigError, described
from meshrl.testing.clock import simulate
from meshrl.user_code import load_name

Scenario: TypeAlias = Callable[[int], Coroutine[object, object, None]]
"""`async def scenario(seed: int) -> None`: it draws random numbers only from the seed, and asserts what must hold."""

_CHUNK = 50
_LOG_SECONDS: Final = 5.0


class ScheduleFailed(AssertionError):
    """A scenario failed under a seed. The text has the failure and the command that replays it exactly."""

    def __init__(self, seed: int, text: str) -> None:
        self.seed = seed
        super().__init__(text)

    def __reduce__(self) -> tuple[type["ScheduleFailed"], tuple[int, str]]:
        return ScheduleFailed, (self.seed, str(self))


def explore(
    scenario: Scenario, seeds: int = 10_000, *, first: int = 0, workers: int = 1, time_limit: float | None = None
) -> None:
    """Run a scenario in virtual time under each seed, `first` to `first + seeds - 1`.

    The scenario gets the seed, which also chooses the task that continues next. Raises `ScheduleFailed` for the lowest
    seed that fails: by an assertion, any other exception, a `Deadlock`, `LeftRunning`, or the limit of virtual seconds.
    A log line says every five seconds how many seeds hold.
    `workers`: number of processes. They import the started script, so the scenario must be a function of a module, and
    a script must call this below `if __name__ == "__main__":`. Raises ConfigError if they cannot.
    """
    tried = range(first, first + seeds)
    if workers > 1:
        seed = _in_processes(_reference(scenario), tried, workers, time_limit)
    else:
        seed = _lowest(((1, _first_failing(scenario, range(each, each + 1), time_limit)) for each in tried), seeds)
    if seed is None:
        return
    name, command = _name(scenario), _command(scenario, seed, time_limit)
    try:
        replay(scenario, seed, time_limit=time_limit)
    except (Exception, asyncio.CancelledError) as error:
        what = described(error)
        raise ScheduleFailed(seed, f"{name} fails under seed {seed}: {what}\nTo replay it: {command}") from error
    raise ScheduleFailed(
        seed,
        f"{name} failed under seed {seed}, but not when it was replayed: it depends on something else than the seed, "
        f"such as what earlier seeds left behind, the real time, or the order of a set\nTo try again: {command}",
    )


def replay(scenario: Scenario, seed: int, *, time_limit: float | None = None) -> None:
    """Run a scenario under one seed, as `explore` does, and raise its error."""
    simulate(lambda: scenario(seed), seed=seed, time_limit=time_limit)


def _lowest(tries: Iterable[tuple[int, int | None]], seeds: int) -> int | None:
    """Return the first failing seed. A try has a number of seeds, and the one of them that fails or None.

    Says now and then how many of the `seeds` hold.
    """
    holding, began = 0, time.perf_counter()
    logged = began
    for count, failing in tries:
        if failing is not None:
            return failing
        holding += count
        now = time.perf_counter()
        if now - logged >= _LOG_SECONDS:
            logged = now
            left = (now - began) / holding * (seeds - holding)
            log.info(f"{holding:,} of {seeds:,} seeds hold", left=f"{left:.0f}s")
    return None


def _first_failing(scenario: Scenario, seeds: range, time_limit: float | None) -> int | None:
    for seed in seeds:
        try:
            with _without_logs():
                replay(scenario, seed, time_limit=time_limit)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 -- whatever it is, it is the finding
            return seed
    return None


@contextmanager
def _without_logs() -> Generator[None]:
    """Suppress the logs of thousands of schedules. Replaying the failing one shows its log."""
    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.reset_defaults()
        if configured:
            structlog.configure(**before)


def _in_processes(reference: str, seeds: range, workers: int, time_limit: float | None) -> int | None:
    """The lowest failing seed. All lower seeds are tried, whichever process finds a failure first."""
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(workers, get_context("spawn"), sys.path.extend, (sys.path,)) as pool:
        try:  # if a process ends early, `submit` may raise too
            pending = [pool.submit(_chunk, reference, chunk, time_limit) for chunk in chunks]
            tries = ((len(chunk), future.result()) for chunk, future in zip(chunks, pending, strict=True))
            return _lowest(tries, len(seeds))
        except BrokenProcessPool as error:
            raise ConfigError(
                f"a process that explores {reference} ended before it was done. Each imports the script that was "
                'started: call `explore` below `if __name__ == "__main__":`, and not from standard input; or run '
                f"`python -m meshrl.testing {reference} --workers {workers}`. If it does this already, the processes "
                "may have had too little memory: use fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _chunk(reference: str, seeds: range, time_limit: float | None) -> int | None:
    return _first_failing(load_scenario(reference), seeds, time_limit)


def _name(scenario: Scenario) -> str:
    return str(getattr(scenario, "__qualname__", scenario))


def _reference(scenario: Scenario) -> str:
    """`FILE.py:NAME`, from which another process loads the scenario."""
    name = _name(scenario)
    file = inspect.getsourcefile(scenario) if inspect.isfunction(scenario) else None
    if file is None or not name.isidentifier() or not Path(file).is_file():
        raise ConfigError(
            f"{name} cannot be loaded in another process: write it as `async def` at the top of a file, or workers=1"
        )
    return f"{file}:{name}"


def _command(scenario: Scenario, seed: int, time_limit: float | None) -> str:
    limit = "" if time_limit is None else f" --time-limit {time_limit:g}"
    try:
        file, _, name = _reference(scenario).rpartition(":")
    except ConfigError:
        given = "" if time_limit is None else f", time_limit={time_limit:g}"
        return f"explore({_name(scenario)}, seeds=1, first={seed}{given})"
    return f"python -m meshrl.testing {os.path.relpath(file)}:{name} --seed {seed}{limit}"


@cache
def load_scenario(reference: str) -> Scenario:
    """Return the function that `FILE.py:NAME` or `MODULE:NAME` names. Raises ConfigError if there is none."""
    scenario = load_name("scenario", reference, (), inspect.iscoroutinefunction)
    if not callable(scenario):
        raise ConfigError(f"scenario {reference!r}: it is a {type(scenario).__name__}, not an async function")
    return cast("Scenario", scenario)
