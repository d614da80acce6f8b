"""The table `[sampler.sglang]`."""

from meshrl.roles import RoleConfig, options_of
from meshrl_inference.options import EngineOptions, check_here


class SglangConfig(EngineOptions):
    """How the backend `sglang` runs its engines."""

    verify_weights: bool = False
    """After each load, read the start of each tensor back from SGLang, and stop the engine if it differs. Slow."""


def check_installed(config: RoleConfig) -> None:
    """BackendError if SGLang is to run in this environment and is not installed."""
    if options_of(config, SglangConfig).python is None:
        check_here("sglang", "sampler.sglang.python")
