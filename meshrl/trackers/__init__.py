"""Experiment trackers for a run: TensorBoard, W&B, MLflow, Trackio, OpenTelemetry and a user's own."""

from meshrl.trackers.base import TrackedRun, Tracker
from meshrl.trackers.delivery import Trackers
from meshrl.trackers.registry import SHIPPED, make_tracker

__all__ = ["SHIPPED", "TrackedRun", "Tracker", "Trackers", "make_tracker"]
