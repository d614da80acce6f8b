"""Environments: they take turns with a model, and the episodes look like the rows of a sampler.

This room has the backend `function`, whose roles call Python functions: a reward, or a step of an environment.
"""

from meshrl.environments.environment import Environment, EnvironmentConfig, FunctionEnvironment, load_environment
from meshrl.environments.episodes import Episodes

__all__ = [
    "MODELS",
    "ROLES",
    "Environment",
    "EnvironmentConfig",
    "Episodes",
    "FunctionEnvironment",
    "load_environment",
]

MODELS = "none"

ROLES = {"Environment": "meshrl.environments:FunctionEnvironment", "Reward": "meshrl.rewards:FunctionReward"}
"""The roles of the backend `function`, for the registry."""
