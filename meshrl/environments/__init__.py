"""TODO-room."""

from meshrl.environments.environment import Environment, EnvironmentConfig, load_environment
from meshrl.environments.episodes import Episodes

__all__ = [
    "Environment",
    "EnvironmentConfig",
    "Episodes",
    "load_environment",
]
