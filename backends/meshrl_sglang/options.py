"""The table `[sampler.sglang]`."""

from pydantic import Field

from meshrl_inference.options import EngineOptions


class SglangConfig(EngineOptions):
    """How the backend `sglang` runs its engines."""

    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and the KV cache. Passes and CUDA graphs come on top, so leave room for
    them: often a tenth, and more for long prompts."""
    verify_weights: bool = False
    """After each load, read the start of each tensor back from SGLang, and stop the engine if it differs. Slow."""
