"""Experiment trackers, besides the run's folder: TensorBoard, W&B, MLflow, Trackio, OpenTelemetry or your own."""

from meshrl.trackers.base import TrackedRun, Tracker
from meshrl.trackers.delivery import Trackers
from meshrl.trackers.registry import SHIPPED, make_tracker

__all__ = ["SHIPPED", "TrackedRun", "Tracker", "Trackers", "make_tracker"]
