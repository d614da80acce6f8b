"""Episodes: an environment that answers the model turn by turn, played as if it were one sampler.

The backend `function` is also here. Its roles call a Python function: a reward, or a step of an environment.
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
"""What the backend `function` offers to the registry."""
