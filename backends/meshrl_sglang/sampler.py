"""The sampler of the SGLang backend."""

from math import inf
from typing import ClassVar

from meshrl_inference.process import Kind
from meshrl_inference.sampler import EngineSampler
from meshrl_sglang.options import SglangConfig


class SglangSampler(EngineSampler):
    """Rollouts by SGLang."""

    kind: ClassVar = Kind("sglang", "SGLang", reads_broadcasts=True)
    options: ClassVar = SglangConfig
    temperatures: ClassVar = (1e-6, inf)
    """Below the first, SGLang takes the most probable token."""
