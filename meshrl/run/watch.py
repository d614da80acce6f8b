"""A run reports each second what it does now, and which calls have been running for long."""

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
from meshrl.observe import LOOKS, NOW, Now, Runs, Waits
from meshrl.run.disk import part_of, write_whole

_MOST: Final = 32
"""Waits that are reported at most, and calls."""
_TEXT: Final = 200
"""Characters of a text at most."""


class Watch:
    """Watches from a thread, because the event loop itself may be blocked.

    Logs calls that take long, and writes now.json.
    """

    def __init__(self, after: float, events: EventLog, folder: Callable[[], Path], check: Callable[[], None]) -> None:
        """`after`: seconds before a call is reported. `folder`: the run's. `check` raises if it must not be written."""
        self._after = after
        self._events = events
        self._folder = folder
        self._check = check
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="meshrl-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError, MeshrlError):
            self._check()
            now = self._folder() / NOW
            for file in (now, part_of(now)):  # the part is left if the folder was moved while it was written
                file.unlink(missing_ok=True)

    def _look(self) -> None:
        while True:
            for told in slow_calls(self._after):
                log.warning(told)
            # The run's own writes report a full disk or a moved folder.
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
    """What blocks it now. If asking fails, which concurrent changes may cause, what blocked it first."""
    with suppress(Exception):
        return pending.on if isinstance(pending.on, str) else pending.on()
    return pending.at_first
