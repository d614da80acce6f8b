"""The interface of experiment trackers, and the thread that calls each."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, described
from meshrl.events import Event
from meshrl.observe import read_run, render
from meshrl.run.folder import EVALUATIONS, METRICS, SAMPLES, decoded, read_lines
from meshrl.user_code import load_name, where_raised

_ID: Final = "run_id"
_OF_SAMPLES: Final = ("prompt", "completion", "answer", "reward_error", "reward")
"""What trackers get of a row."""
_MAX_QUEUED: Final = 10_000
"""Messages that may wait for a tracker."""
_PATIENCE: Final = 120.0
"""Seconds that a run waits at its end for all trackers to finish."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of a run."""

    id: str
    """Identifier of the run. A resumed run keeps it, and each new run has another."""
    name: str
    project: str | None
    """Project of the run. None if `run.project` is not set."""
    folder: Path
    """Folder of the run. A tracker may keep files there."""
    config: Mapping[str, object]
    """The resolved configuration, as tables of numbers, texts and lists."""
    first_step: int
    """The next step. Above 0 if the run is resumed."""
    goes_on: bool
    """True if trackers already know the run, because it is resumed."""

    @property
    def links(self) -> Mapping[str, str]:
        """The run's `folder`, its `report`, and, with `run.otlp`, the prefix of the ids of its `traces`."""
        folder, table = self.folder.resolve(), self.config.get("run")
        links = {"folder": str(folder), "report": str(folder / "report.html")}
        return {**links, "traces": self.id} if isinstance(table, Mapping) and table.get("otlp") else links

    def project_by(self, variable: str) -> str:
        """Return the project: from the configuration, else from the tracker's environment variable, else `meshrl`."""
        return self.project or os.environ.get(variable) or "meshrl"


class Tracker:
    """The base of experiment trackers. Override the methods that you need, and name it in `run.log` as `file.py:Name`.

        class Print(Tracker):
            def metrics(self, step, values):
                print(step, values)

    It is constructed without arguments before the run starts, and an error there stops the run. Its methods are called
    one after the other on a separate thread while the run continues. An error in a method is logged as a warning, and
    the tracker is not called again.
    """

    wants_report = False
    """True if `end` should receive the run's report."""
    wants_events = False
    """True if `events` should be called."""
    wants_history: bool = False
    """True if `metrics` and `samples` should be called again for what a resumed run had recorded at its checkpoint. For
    trackers that may have lost it, and that leave out what they have."""
    begins_at_once = False
    """True if the run should wait for `begin`. For trackers that are fast and open files in the run's folder."""

    def begin(self, run: TrackedRun) -> None:
        """Called when the run has its folder, at its first step or when it first records numbers."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Called with the numbers of a step, or of an evaluation that began at this step, which may be an earlier one.

        A resumed run repeats the steps after its checkpoint.
        """

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Called with some rows of a step's batch. All have the same keys, such as `prompt` and `reward`."""

    def events(self, events: Sequence[Event], began: float) -> None:
        """Called with the events of the last second, if the class sets `wants_events = True`.

        `began`: the zero of the events' times, in Unix seconds.
        """

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Called when the run is over. `summary` has the keys of summary.json.

        Its `status` is `finished`, `interrupted` or `failed`. `report`: the HTML file of the report, if the tracker
        wants it and it could be made.
        """


_SHIPPED: Final = {
    "tensorboard": "meshrl.run.trackers.shipped:TensorBoard",
    "wandb": "meshrl.run.trackers.shipped:Wandb",
    "mlflow": "meshrl.run.trackers.shipped:Mlflow",
    "trackio": "meshrl.run.trackers.shipped:Trackio",
    "otlp": "meshrl.run.trackers.otlp:Otlp",
}
"""The shipped trackers and their places. All except the first need the extra of the same name."""


def make_tracker(name: str) -> Tracker:
    """Construct the tracker of this name. Raises ConfigError if there is none or it cannot be constructed."""

    def is_own(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, Tracker) and value is not Tracker

    try:
        if name in _SHIPPED:
            module, _, attribute = _SHIPPED[name].partition(":")
            cls: object = getattr(import_module(module), attribute)
        else:
            cls = load_name("tracker", name, _SHIPPED, is_own)
        if not (isinstance(cls, type) and issubclass(cls, Tracker)):
            raise ConfigError(f"tracker {name!r} is not a class that inherits from meshrl.Tracker")
        return cls()
    except ConfigError as error:
        raise ConfigError(f"run.log: {error}") from error.__cause__
    except ModuleNotFoundError as error:
        remedy = f"pip install 'meshrl[{name}]'" if name in _SHIPPED else "install it, or take the tracker out"
        raise ConfigError(f"run.log: {name!r} needs the package {error.name!r}: {remedy}") from error
    except Exception as error:  # a library or a user's code may raise anything
        raise ConfigError(f"run.log: the tracker {name!r} could not be made: {where_raised(error)}") from error


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
        file = folder / _ID
        goes_on = file.is_file()
        if not goes_on:
            file.write_text(uuid.uuid4().hex[:16] + "\n", "utf-8")
        run_id = file.read_text("utf-8").strip()
        run = TrackedRun(run_id, folder.name, self._project, folder, config, first_step, goes_on)
        for queue in self._queues:
            queue.start(run)

    def recall(self, folder: Path) -> None:
        """Send what a resumed run had recorded at its checkpoint to the trackers that want it."""
        wanting = [queue for queue in self._queues if queue.tracker.wants_history]
        if not wanting:
            return
        numbers = [
            line for name in (METRICS, EVALUATIONS) for line in read_lines(folder / name, dict[str, float | None])
        ]
        rows = groupby(_samples_in(folder / SAMPLES), key=lambda row: row.step)
        samples = [(step, [row.shown() for row in some]) for step, some in rows]
        for queue in wanting:
            queue.put(partial(_recall, queue.tracker, numbers, samples))

    def send(self, message: Callable[[Tracker], None]) -> None:
        """Call each tracker, in the order of messages, on its thread."""
        for queue in self._queues:
            queue.put(partial(message, queue.tracker))

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
            queue.close()
        deadline = time.monotonic() + _PATIENCE
        for queue in self._queues:
            queue.wait(deadline)


def shown_in_trackers(rows: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Return what trackers get of rows of samples.jsonl: texts and rewards of those that were trained on."""
    return [{name: row[name] for name in _OF_SAMPLES if name in row} for row in rows if row.get("held_out") is not True]


class _Sample(msgspec.Struct):
    """What trackers get of a line of samples.jsonl. The rest of it, most of all tokens, is not decoded."""

    step: int
    prompt: object = msgspec.UNSET
    completion: object = msgspec.UNSET
    answer: object = msgspec.UNSET
    reward_error: object = msgspec.UNSET
    reward: object = msgspec.UNSET
    held_out: object = False  # runs of older versions have a batch's own column here

    def shown(self) -> Mapping[str, object]:
        found: dict[str, object] = {name: getattr(self, name) for name in _OF_SAMPLES}
        return {name: value for name, value in found.items() if value is not msgspec.UNSET}


def _samples_in(file: Path) -> Iterator[_Sample]:
    """Yield rows of samples.jsonl that were trained on, with one in memory at a time. DataError for an invalid line."""
    if file.is_file():
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                sample = decoded(f"{file}, line {number}", line, _Sample)
                if sample.held_out is not True:
                    yield sample


def _recall(
    tracker: Tracker,
    numbers: Sequence[Mapping[str, float | None]],
    samples: Sequence[tuple[int, Sequence[Mapping[str, object]]]],
) -> None:
    for line in numbers:
        values = {name: value for name, value in line.items() if value is not None}
        step, _ = int(values.pop("step")), values.pop("seconds", None)
        tracker.metrics(step, values)
    for step, rows in samples:
        tracker.samples(step, rows)


class _Queue:
    def __init__(self, name: str, tracker: Tracker) -> None:
        self.tracker = tracker
        self._name = name
        self._queue = SimpleQueue[Callable[[], None] | None]()
        self._broken = False
        self._thread: Thread | None = None

    def start(self, run: TrackedRun) -> None:
        first = [partial(self.tracker.begin, run)]
        if self.tracker.begins_at_once:
            self._send(first.pop())
        if self._broken:
            return
        self._thread = Thread(target=self._deliver, args=first, name=f"tracker {self._name}", daemon=True)
        self._thread.start()

    def put(self, message: Callable[[], None]) -> None:
        if self._broken:
            return
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(message)
        else:
            self._give_up(f"{_MAX_QUEUED} messages wait for it")

    def close(self) -> None:
        self._queue.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until all messages are taken, or until `deadline` on the monotonic clock."""
        if self._thread and not self._broken:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._give_up(f"it has not taken everything within {_PATIENCE:g} s")

    def _deliver(self, *first: Callable[[], None]) -> None:
        for message in chain(first, iter(self._queue.get, None)):
            if self._broken:
                return
            self._send(message)

    def _send(self, message: Callable[[], None]) -> None:
        try:
            message()
        except Exception as error:  # noqa: BLE001 -- a library or a user's code may raise anything
            self._give_up(described(error))

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
