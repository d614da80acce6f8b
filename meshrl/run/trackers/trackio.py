"""Trackio, through its library. TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables work as usual."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from meshrl.run.trackers.base import TrackedRun, Tracker


class Trackio(Tracker):
    """Writes the configuration, numbers by step, a table `samples`, and the report as an artifact."""

    wants_report = True

    def __init__(self) -> None:
        self._trackio = import_module("trackio")

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""
        self._name = run.name
        self._run = self._trackio.init(
            project=run.project_by("TRACKIO_PROJECT"),
            name=run.name,
            config={**run.config, "links": dict(run.links)},
            resume="allow" if run.goes_on else "never",
            embed=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send a table."""
        data = [list(row.values()) for row in rows]
        self._run.log({"samples": self._trackio.Table(columns=list(rows[0]), data=data)}, step=step)

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Send the summary and close the run."""
        self._run.log({key: value for key, value in summary.items() if isinstance(value, int | float)})
        if report:
            self._run.log_artifact(str(report), name=f"{self._name}-report", type="report")
        self._run.finish()
