"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, Trackio and a user's own, beside the run's folder."""

from meshrl.trackers.base import TrackedRun, Tracker
from meshrl.trackers.delivery import Trackers
from meshrl.trackers.registry import SHIPPED, make_tracker

__all__ = ["SHIPPED", "TrackedRun", "Tracker", "Trackers", "make_tracker"]
