"""The table `[sampler.sglang]`."""

from meshrl_inference.options import EngineOptions


class SglangConfig(EngineOptions):
    """How the backend `sglang` runs its engines."""

    verify_weights: bool = False
    """After each load, read the start of each tensor back from SGLang, and stop the engine if it differs. Slow."""
