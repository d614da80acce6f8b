"""The sampler of the vLLM backend."""

from typing import ClassVar

from meshrl_inference.process import Kind
from meshrl_inference.sampler import EngineSampler
from meshrl_vllm.options import VllmConfig


class VllmSampler(EngineSampler):
    """Rollouts by vLLM."""

    kind: ClassVar = Kind("vllm", "vLLM", reads_broadcasts=True, takes_adapters=True)
    options: ClassVar = VllmConfig
    temperatures: ClassVar = (0.01, 2.0)
    """Below the first, vLLM silently samples at the first."""
