"""Experiment trackers, besides the run's folder: TensorBoard, W&B, MLflow, Trackio, OpenTelemetry or your own."""

from meshrl.run.trackers.base import TrackedRun, Tracker
from meshrl.run.trackers.delivery import Trackers
from meshrl.run.trackers.registry import SHIPPED, make_tracker

__all__ = ["SHIPPED", "TrackedRun", "Tracker", "Trackers", "make_tracker"]
