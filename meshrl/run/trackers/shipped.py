"""The shipped trackers, each through its own library, which is imported when a run uses it."""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final, cast

import tomli_w

from meshrl.config import dotted, leaves
from meshrl.errors import ConfigError
from meshrl.run.trackers.base import TrackedRun, Tracker

_MLFLOW_TAG: Final = "meshrl.run"
_MLFLOW_INVALID: Final = re.compile(r"[^\w\-. :/]")
"""Characters that a metric's name must not contain: `eval/pass@1` becomes `eval/pass_1`."""
_MLFLOW_LONGEST: Final = 500
"""Length of a parameter that each of MLflow's stores accepts, in characters."""
_MLFLOW_SAMPLES: Final = "samples.json"
_MLFLOW_TABLES: Final = "mlflow.loggedArtifacts"
"""The tag that marks an artifact as a table for MLflow's pages."""
_MLFLOW_STATUS: Final = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class TensorBoard(Tracker):
    """Writes `events.out.tfevents.*` into the run's folder, one file for each part of a resumed run."""

    begins_at_once = True

    def __init__(self) -> None:
        # Not at the top of the file, because `import meshrl` should not load them. They have no types.
        self._event = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._file: BinaryIO | None = None

    def begin(self, run: TrackedRun) -> None:
        """Open the file."""
        # TensorBoard recognises event files by `tfevents` in their name.
        self._file = (run.folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}").open("wb")
        self._records = self._writer(self._file)
        self._add(file_version="brain.Event:2")
        if run.first_step:  # readers then ignore later steps of earlier files
            log = self._event.SessionLog
            self._add(step=run.first_step, session_log=log(status=log.START))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers."""
        shown = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=shown))

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _add(self, **fields: object) -> None:
        if self._file:
            with ExitStack() as broken:  # a file that cannot be written gets no end
                broken.callback(self._file.close)
                self._records.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())
                self._file.flush()
                broken.pop_all()


class Wandb(Tracker):
    """Writes the configuration, numbers by `step`, a table `samples`, and the report as an artifact."""

    wants_report = True
    wants_history: bool = True

    def __init__(self) -> None:
        self._wandb = import_module("wandb")
        # Nobody would answer a question on the terminal in the middle of a run.
        self._has_server = self._wandb.setup().settings.mode in ("online", "shared")
        if self._has_server and not self._wandb.login(prompt=False):
            raise ConfigError("'wandb' has no API key: run `wandb login`, or set WANDB_MODE=offline")

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""
        self._name = run.name
        # Offline, a killed run loses what wandb has not flushed, and a resumed one counts its lines from 0.
        for earlier in (run.folder / "wandb").glob(f"offline-run-*-{run.id}"):  # all of it is written again
            earlier.rename(earlier.with_name(f"earlier-{earlier.name}"))
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
        lines: Iterable[Mapping[str, object]] = ()
        if self._has_server and run.goes_on:
            lines = self._wandb.Api().run(self._run.path).scan_history(use_cache=False)
        self._known = {(line.get("step"), name) for line in lines for name, value in line.items() if value is not None}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers, unless the server has them from an earlier attempt."""
        if new := {name: value for name, value in values.items() if (step, name) not in self._known}:
            self._run.log({"step": step, **new})

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send a table."""
        if (step, "samples") in self._known:
            return
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


class Trackio(Tracker):
    """Writes the configuration, numbers by step, a table `samples`, and the report as an artifact."""

    wants_report = True
    wants_history: bool = True

    def __init__(self) -> None:
        self._trackio = import_module("trackio")

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""
        self._name, project = run.name, run.project_by("TRACKIO_PROJECT")
        stored = import_module("trackio.sqlite_storage").SQLiteStorage
        lines: list[Mapping[str, object]] = stored.get_logs(project, run.name) if run.goes_on else []
        self._known = {(line.get("step"), name) for line in lines for name in line}
        self._run = self._trackio.init(
            project=project,
            name=run.name,
            config={**run.config, "links": dict(run.links)},
            resume="allow" if run.goes_on else "never",
            embed=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers, unless they are there from an earlier attempt."""
        if new := {name: value for name, value in values.items() if (step, name) not in self._known}:
            self._run.log(new, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send a table."""
        if (step, "samples") in self._known:
            return
        data = [list(row.values()) for row in rows]
        self._run.log({"samples": self._trackio.Table(columns=list(rows[0]), data=data)}, step=step)

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Send the summary and close the run."""
        self._run.log({key: value for key, value in summary.items() if isinstance(value, int | float)})
        if report:
            self._run.log_artifact(str(report), name=f"{self._name}-report", type="report")
        self._run.finish()


class Mlflow(Tracker):
    """Writes parameters and metrics, and `samples.json`, `config.toml` and `report.html` as artifacts."""

    wants_report = True
    wants_history: bool = True

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
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {_MLFLOW_TAG: run.id, **{f"meshrl.{name}": value for name, value in run.links.items()}}
        known = self._client.search_runs([number], f"tags.`{_MLFLOW_TAG}` = '{run.id}'") if run.goes_on else []
        record = known[0] if known else self._client.create_run(number, run_name=run.name, tags=tags)
        self._id = record.info.run_id
        self._goes_on = bool(known)
        if known:
            self._client.update_run(self._id, status="RUNNING")
        # A parameter can be written only once. Changed ones of a resumed run are only in its config.toml.
        every = ((dotted(path), value) for path, value in leaves(run.config) if value != {})
        new = [(key, str(value)[:_MLFLOW_LONGEST]) for key, value in every if key not in record.data.params]
        for first in range(0, len(new), 100):  # the limit of a request
            some = [self._entities.Param(key, value) for key, value in new[first : first + 100]]
            self._client.log_batch(self._id, params=some)
        self._client.log_text(self._id, tomli_w.dumps(run.config), "config.toml")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers, unless they are there from an earlier attempt."""
        now = int(time.time() * 1000)
        named = {_MLFLOW_INVALID.sub("_", name): value for name, value in values.items()}
        new = {name: value for name, value in named.items() if step not in self._known(name)}
        metrics = [self._entities.Metric(name, value, now, step) for name, value in new.items()]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    @cache  # noqa: B019 -- there is one for a run
    def _known(self, name: str) -> set[int]:
        """The steps at which an earlier attempt has sent this number."""
        return {each.step for each in self._client.get_metric_history(self._id, name)} if self._goes_on else set()

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send a table, as the client's `log_table` does, which needs pandas."""
        if self._samples is None:
            self._samples = self._earlier_samples()
        if any(row[0] == step for row in self._samples):
            return
        self._samples += [[step, *row.values()] for row in rows]
        self._client.log_dict(self._id, {"columns": ["step", *rows[0]], "data": self._samples}, _MLFLOW_SAMPLES)

    def _earlier_samples(self) -> list[list[object]]:
        """The samples that a resumed run has sent. In a new run, announce the table."""
        if any(each.path == _MLFLOW_SAMPLES for each in self._client.list_artifacts(self._id)):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(self._client.download_artifacts(self._id, _MLFLOW_SAMPLES, folder))
                return cast("list[list[object]]", json.loads(file.read_bytes())["data"])
        self._client.set_tag(self._id, _MLFLOW_TABLES, json.dumps([{"path": _MLFLOW_SAMPLES, "type": "table"}]))
        return []

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Send the summary and close the run."""
        self._client.log_dict(self._id, dict(summary), "summary.json")
        if report:
            self._client.log_artifact(self._id, str(report))
        self._client.set_terminated(self._id, _MLFLOW_STATUS[str(summary["status"])])
