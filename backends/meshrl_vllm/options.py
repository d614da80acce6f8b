"""The table `[sampler.vllm]`. `meshrl serve` uses its environment and memory."""

from meshrl.roles import RoleConfig, options_of
from meshrl_inference.options import EngineOptions, check_here


class VllmConfig(EngineOptions):
    """How the backend `vllm` runs its engines."""


def check_installed(config: RoleConfig) -> None:
    """BackendError if vLLM is to run in this environment and is not installed."""
    if options_of(config, VllmConfig).python is None:
        check_here("vllm", "sampler.vllm.python")
