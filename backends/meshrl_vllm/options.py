"""The table `[sampler.vllm]`, of which a server takes the environment and the memory."""

from meshrl.roles import RoleConfig, options_of
from meshrl_inference.options import EngineOptions, check_here


class VllmConfig(EngineOptions):
    """How the backend `vllm` runs its engines."""


def check_installed(config: RoleConfig) -> None:
    """BackendError where vLLM is to run in this environment, which has none."""
    if options_of(config, VllmConfig).python is None:
        check_here("vllm", "sampler.vllm.python")
