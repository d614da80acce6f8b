"""Calls trackers, each on its own thread, so that a slow or broken tracker does not delay the run."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final

from meshrl import log
from meshrl.errors import described
from meshrl.events import Event
from meshrl.observe import read_run, render
from meshrl.run.trackers.base import TrackedRun, Tracker
from meshrl.run.trackers.registry import make_tracker

_ID: Final = "run_id"
_MOST: Final = 10_000
"""Messages that may wait for a tracker."""
_PATIENCE: Final = 120.0
"""Seconds that a run waits at its end for all trackers to finish."""


class Trackers:
    """All trackers of a run. Messages wait until `begin`, when the run has its folder."""

    def __init__(self, names: Sequence[str], project: str | None = None) -> None:
        """`names`: as in `run.log`. `project`: as in `run.project`. Raises ConfigError if one cannot be made."""
        self._project = project
        self._queues = [_Queue(name, make_tracker(name)) for name in names]
        self._begun = False

    def begin(self, folder: Path, config: Mapping[str, object], first_step: int) -> None:
        """Begin, now that the run has its folder. A second call does nothing."""
        if self._begun or not self._queues:
            return
        self._begun = True
        known = folder / _ID
        goes_on = known.is_file()
        if not goes_on:
            known.write_text(uuid.uuid4().hex[:16] + "\n", "utf-8")
        name = known.read_text("utf-8").strip()
        run = TrackedRun(name, folder.name, self._project, folder, config, first_step, goes_on)
        for queue in self._queues:
            queue.start(run)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step or an evaluation."""
        for queue in self._queues:
            queue.put(partial(queue.tracker.metrics, step, values))

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send some rows of a step's batch."""
        for queue in self._queues:
            queue.put(partial(queue.tracker.samples, step, rows))

    def events(self, events: Sequence[Event], began: float) -> None:
        """Send events. `began`: the zero of their times, in Unix seconds."""
        for queue in self._queues:
            if queue.tracker.wants_events:
                queue.put(partial(queue.tracker.events, events, began))

    def end(self, folder: Path | None, summary: Mapping[str, object]) -> None:
        """End the run, after its files are written. `folder`: None if it belongs to another run by now.

        Waits until the trackers have taken all messages. If the run never had its folder, they get none.
        """
        if not self._begun:
            return
        wanted = any(queue.tracker.wants_report for queue in self._queues)
        report = _report(folder) if wanted and folder else None
        for queue in self._queues:
            queue.put(partial(queue.tracker.end, summary, report if queue.tracker.wants_report else None))
        for queue in self._queues:
            queue.close()
        deadline = time.monotonic() + _PATIENCE
        for queue in self._queues:
            queue.wait(deadline)


class _Queue:
    """Messages to one tracker, in order."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.tracker = tracker
        self._name = name
        self._queue = SimpleQueue[Callable[[], None] | None]()
        self._broken = False
        self._thread: Thread | None = None

    def start(self, run: TrackedRun) -> None:
        begin = partial(self.tracker.begin, run)
        at_once = self.tracker.begins_at_once
        if at_once and not self._taken(begin):
            return
        first = () if at_once else (begin,)
        self._thread = Thread(target=self._deliver, args=first, name=f"tracker {self._name}", daemon=True)
        self._thread.start()

    def put(self, message: Callable[[], None]) -> None:
        if self._broken:
            return
        if self._queue.qsize() < _MOST:
            self._queue.put(message)
        else:
            self._give_up(f"{_MOST} messages wait for it")

    def close(self) -> None:
        """Accept no more messages."""
        self._queue.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until all messages are taken, or until `deadline` on the monotonic clock."""
        if self._thread and not self._broken:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._give_up(f"it has not taken everything within {_PATIENCE:g} s")

    def _deliver(self, *first: Callable[[], None]) -> None:
        if not all(map(self._taken, first)):
            return
        while (message := self._queue.get()) is not None and not self._broken:
            if not self._taken(message):
                return

    def _taken(self, message: Callable[[], None]) -> bool:
        """Pass a message to the tracker. False if it raised, after which it gets no more."""
        try:
            message()
        except Exception as error:  # noqa: BLE001 -- a library or a user's code may raise anything
            self._give_up(described(error))
            return False
        return True

    def _give_up(self, why: str) -> None:
        self._broken = True
        log.warning(f"the tracker {self._name} receives nothing more of this run, whose folder has everything: {why}")


def _report(folder: Path) -> Path | None:
    file = folder / "report.html"
    try:
        file.write_text(render(read_run(folder)), "utf-8")
    except Exception as error:  # noqa: BLE001 -- a failing report does not fail a finished run
        log.warning(f"{folder}: no report could be made for the trackers: {described(error)}")
        return None
    return file
