"""Seeds from several numbers: equal for equal numbers, in any place and at any time."""

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]


def key(*parts: int) -> UInt64:
    """Hash the parts in their order to one uint64[]."""
    mixed = np.zeros((), np.uint64)
    for part in parts:
        mixed = mix(mixed + np.array(part & 0xFFFF_FFFF_FFFF_FFFF, np.uint64))
    return mixed


def mix(state: UInt64) -> UInt64:
    """Apply Splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    with np.errstate(over="ignore"):
        mixed = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
