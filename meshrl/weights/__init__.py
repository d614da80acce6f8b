"""A model's weights on their way from what trains to what samples.

Tensors travel by name in buckets of shared memory; each is known by a fingerprint, so that a sampler can prove what
it has. `delta` sends only what changed.
"""

from meshrl.weights.bucket import Bucket, Entry
from meshrl.weights.delta import WeightSource
from meshrl.weights.weights import Probe, Weights

__all__ = [
    "Bucket",
    "Entry",
    "Probe",
    "WeightSource",
    "Weights",
]
