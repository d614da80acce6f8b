"""TensorBoard's event files, written with the tensorboard package only."""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from meshrl.run.trackers.base import TrackedRun, Tracker


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
