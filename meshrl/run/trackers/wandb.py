"""Weights & Biases, through its library. WANDB_MODE, WANDB_ENTITY and its other variables work as usual."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from meshrl.errors import ConfigError
from meshrl.run.trackers.base import TrackedRun, Tracker


class Wandb(Tracker):
    """Writes the configuration, numbers by `step`, a table `samples`, and the report as an artifact."""

    wants_report = True

    def __init__(self) -> None:
        self._wandb = import_module("wandb")
        # Nobody would answer a question on the terminal in the middle of a run.
        if self._wandb.setup().settings.mode == "online" and not self._wandb.login(prompt=False):
            raise ConfigError("'wandb' has no API key: run `wandb login`, or set WANDB_MODE=offline")

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""
        self._name = run.name
        self._run = self._wandb.init(
            project=run.project_by("WANDB_PROJECT"),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config={**run.config, "links": dict(run.links)},
        )
        # A separate step axis, because an evaluation's numbers arrive after those of later steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers."""
        self._run.log({"step": step, **values})

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send a table."""
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[list(row.values()) for row in rows], allow_mixed_types=True)
        self._run.log({"step": step, "samples": table})

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Send the summary and close the run."""
        self._run.summary.update(dict(summary))
        if report:
            artifact = self._wandb.Artifact(f"{self._name}-report", "report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if summary["status"] == "finished" else 1)
