"""A run watches itself each second: which calls have been running for long, and what it does now."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from meshrl import log
from meshrl.errors import MeshrlError
from meshrl.events import EventLog, Pending
from meshrl.mesh import running_calls, slow_calls
from meshrl.run.disk import write_whole

NOW: Final = "now.json"
"""In the folder of a run that is under way: a `Now`, written anew each second, and removed at the run's end."""
LOOKS: Final = 1.0
"""Seconds between two looks, at most."""
_MOST: Final = 32
"""Of waits, and of calls."""
_TEXT: Final = 200
"""The most characters of a text."""


class Waits(msgspec.Struct, frozen=True):
    """Somebody waits: `trainer` for `a batch`, `3 of 64 groups are ready`."""

    who: str
    what: str
    on: str
    seconds: float
    """So far."""


class Runs(msgspec.Struct, frozen=True):
    """A call that has not been answered: `Policy.update` by `rank 0 (...)`."""

    where: str
    ranks: str
    seconds: float
    """So far."""


class Now(msgspec.Struct, frozen=True):
    """What a run does at a moment."""

    at: float
    """Seconds since its start."""
    waits: list[Waits]
    calls: list[Runs]


class Watch:
    """Looks from a thread, for the loop itself may be what is blocked.

    Says in the log what has not answered for long, and writes now.json.
    """

    def __init__(self, after: float, events: EventLog, folder: Callable[[], Path], check: Callable[[], None]) -> None:
        """`after`: seconds before a call is told of. `folder`: where the run writes, where `check` raises no error."""
        self._after = after
        self._events = events
        self._folder = folder
        self._check = check
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="meshrl-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError, MeshrlError):
            self._check()
            (self._folder() / NOW).unlink(missing_ok=True)

    def _look(self) -> None:
        while True:
            for told in slow_calls(self._after):
                log.warning(told)
            # A disk that is full, or a folder that somebody moved, is for the run's own writes to tell.
            with suppress(OSError, MeshrlError):
                self._check()
                write_whole(self._folder() / NOW, msgspec.json.encode(_now(self._events)))
            if self._stopped.wait(min(LOOKS, self._after)):
                return


def _now(events: EventLog) -> Now:
    at = events.now()
    pending = [each for each in list(Pending.table.values()) if each.to is events][:_MOST]
    calls = sorted(running_calls(), key=lambda call: -call[2])[:_MOST]
    return Now(
        round(at, 1),
        [Waits(each.who, each.what, _on(each)[:_TEXT], round(at - each.began, 1)) for each in pending],
        [Runs(where, ranks[:_TEXT], round(seconds, 1)) for where, ranks, seconds in calls],
    )


def _on(pending: Pending) -> str:
    """By what it is blocked now; at first, where what would say so fails, as one that changes meanwhile may."""
    with suppress(Exception):
        return pending.on if isinstance(pending.on, str) else pending.on()
    return pending.at_first
