"""Experiment trackers, besides the run's folder: TensorBoard, W&B, MLflow, Trackio, OpenTelemetry or your own."""

from meshrl.run.trackers.base import TrackedRun, Tracker, Trackers, make_tracker, shown_in_trackers

__all__ = ["TrackedRun", "Tracker", "Trackers", "make_tracker", "shown_in_trackers"]
