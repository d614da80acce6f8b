"""Experiment trackers, besides the run's folder: TensorBoard, W&B, MLflow, Trackio, OpenTelemetry or your own."""

from meshrl.run.trackers.base import (
    TrackedRun as TrackedRun,
    Tracker as Tracker,
    Trackers as Trackers,
    make_tracker as make_tracker,
    shown_in_trackers as shown_in_trackers,
)
