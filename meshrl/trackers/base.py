"""The base of experiment trackers: what a tracker receives from a run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.events import Event


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker is told of it."""

    id: str
    """The same where the run goes on from a checkpoint, and another for each new run."""
    name: str
    project: str | None
    """None where `run.project` is not set."""
    folder: Path
    """Of the run; a tracker may keep files there."""
    config: Mapping[str, object]
    """The resolved configuration: tables of numbers, texts and lists."""
    first_step: int
    """The first that is to come; over 0 where the run goes on."""
    goes_on: bool
    """Whether trackers have been told of it before."""

    @property
    def links(self) -> Mapping[str, str]:
        """Its `folder`, the `report` in it, and with `run.otlp` what the ids of its `traces` begin with."""
        folder, table = self.folder.resolve(), self.config.get("run")
        links = {"folder": str(folder), "report": str(folder / "report.html")}
        return {**links, "traces": self.id} if isinstance(table, Mapping) and table.get("otlp") else links

    def project_by(self, variable: str) -> str:
        """The project: of the configuration, else of the tracker's own environment variable, else `meshrl`."""
        return self.project or os.environ.get(variable) or "meshrl"


class Tracker:
    """Where numbers of a run go beside its folder: override what is of use. Named in `run.log` as `file.py:Name`.

        class Print(Tracker):
            def metrics(self, step, values):
                print(step, values)

    It is made before the run starts, without arguments; what it raises there stops the run. Its methods are called on
    one thread of its own, one after the other, while the run goes on: what they raise is a warning, and the last that
    it is told.
    """

    wants_report = False
    """Whether `end` is given the run's report."""
    wants_events = False
    """Whether it is told events."""
    begins_at_once = False
    """Whether the run waits for `begin`: for one that is quick, and opens its files while the run has its folder."""

    def begin(self, run: TrackedRun) -> None:
        """The run has its folder: it makes its first step, or has found something before it."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step, or of an evaluation that began when so many steps were done, perhaps an earlier one.

        A run that goes on tells steps again that came after its checkpoint.
        """

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Some rows of a step's batch, with the same keys: `prompt`, `completion`, and so on, `reward` a number."""

    def events(self, events: Sequence[Event], began: float) -> None:
        """What happened in the last second, where the class sets `wants_events = True`.

        `began`: when their times count from, in seconds since 1970.
        """

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """The run is over: its `status` is `finished`, `interrupted` or `failed`, and other keys as in summary.json.

        `report`: the file of a page, where it is wanted and could be made.
        """
