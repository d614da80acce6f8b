"""TODO-room."""

from meshrl.weights.bucket import Bucket, Entry
from meshrl.weights.delta import Sender
from meshrl.weights.weights import Probe, Weights

__all__ = [
    "Bucket",
    "Entry",
    "Probe",
    "Sender",
    "Weights",
]
