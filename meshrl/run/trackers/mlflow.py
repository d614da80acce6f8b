"""MLflow, through its client. MLFLOW_TRACKING_URI and its other variables work as usual."""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, cast

import tomli_w

from meshrl.run.trackers.base import TrackedRun, Tracker

_TAG: Final = "meshrl.run"
_NOT_TAKEN: Final = re.compile(r"[^\w\-. :/]")
"""Characters that a metric's name must not contain: `eval/pass@1` becomes `eval/pass_1`."""
_LONGEST: Final = 500
"""Length of a parameter that each of MLflow's stores accepts, in characters."""
_SAMPLES: Final = "samples.json"
_TABLES: Final = "mlflow.loggedArtifacts"
"""The tag that marks an artifact as a table for MLflow's pages."""
_ENDS: Final = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class Mlflow(Tracker):
    """Writes parameters and metrics, and `samples.json`, `config.toml` and `report.html` as artifacts."""

    wants_report = True

    def __init__(self) -> None:
        mlflow = import_module("mlflow")
        if str(mlflow.get_tracking_uri()).startswith("sqlite:"):  # the default
            import_module("sqlalchemy")
            import_module("alembic")
        self._client = mlflow.MlflowClient()
        self._entities = import_module("mlflow.entities")
        self._samples: list[list[object]] | None = None

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""
        name = run.project_by("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        links = {f"meshrl.{name}": value for name, value in run.links.items()}
        known = self._client.search_runs([place], f"tags.`{_TAG}` = '{run.id}'") if run.goes_on else []
        there = known[0] if known else self._client.create_run(place, run_name=run.name, tags={_TAG: run.id, **links})
        self._id = there.info.run_id
        if known:
            self._client.update_run(self._id, status="RUNNING")
        # A parameter can be written only once. Changed ones of a resumed run are only in its config.toml.
        new = [(key, value) for key, value in _flat(run.config) if key not in there.data.params]
        for first in range(0, len(new), 100):  # the limit of a request
            some = [self._entities.Param(key, value) for key, value in new[first : first + 100]]
            self._client.log_batch(self._id, params=some)
        self._client.log_text(self._id, tomli_w.dumps(run.config), "config.toml")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers."""
        now = int(time.time() * 1000)
        told = [self._entities.Metric(_NOT_TAKEN.sub("_", name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=told)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send a table, as the client's `log_table` does, which needs pandas."""
        if self._samples is None:
            self._samples = self._sent()
        self._samples += [[step, *row.values()] for row in rows]
        self._client.log_dict(self._id, {"columns": ["step", *rows[0]], "data": self._samples}, _SAMPLES)

    def _sent(self) -> list[list[object]]:
        """The samples that a resumed run has sent. In a new run, announce the table."""
        if any(each.path == _SAMPLES for each in self._client.list_artifacts(self._id)):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(self._client.download_artifacts(self._id, _SAMPLES, folder))
                return cast("list[list[object]]", json.loads(file.read_bytes())["data"])
        self._client.set_tag(self._id, _TABLES, json.dumps([{"path": _SAMPLES, "type": "table"}]))
        return []

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Send the summary and close the run."""
        self._client.log_dict(self._id, dict(summary), "summary.json")
        if report:
            self._client.log_artifact(self._id, str(report))
        self._client.set_terminated(self._id, _ENDS[str(summary["status"])])


def _flat(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value with its dotted key, such as `policy.optimizer.lr`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)[:_LONGEST]
