"""The interface of experiment trackers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.events import Event


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
