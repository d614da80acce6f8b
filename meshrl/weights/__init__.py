"""A model's weights on their way from the policy to the samplers.

Tensors travel by name in buckets of shared memory. Each has a fingerprint, so a sampler can prove what it received.
`delta` sends only what changed.
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
