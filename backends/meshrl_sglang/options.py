"""The table `[sampler.sglang]`."""

from meshrl.roles import RoleConfig, options_of
from meshrl_inference.options import EngineOptions, check_here


class SglangConfig(EngineOptions):
    """How the backend `sglang` runs its engines."""

    read_back: bool = False
    """After each load, ask SGLang how each tensor begins, and end the engine where that is not what was sent: slow."""


def check_installed(config: RoleConfig) -> None:
    """BackendError where SGLang is to run in this environment, which has none."""
    if options_of(config, SglangConfig).python is None:
        check_here("sglang", "sampler.sglang.python")
