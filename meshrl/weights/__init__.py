"""A model's weights, as they are sent from a policy to samplers.

Tensors are sent by name, in buckets of shared memory. Each has a fingerprint, so that a sampler can prove what it has.
`delta` sends only what changed.
"""

from meshrl.weights.arrival import ArrivalLog
from meshrl.weights.bucket import Bucket, Entry
from meshrl.weights.delta import WeightSource
from meshrl.weights.weights import Probe, Weights

__all__ = [
    "ArrivalLog",
    "Bucket",
    "Entry",
    "Probe",
    "WeightSource",
    "Weights",
]
