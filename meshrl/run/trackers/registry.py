"""Find trackers by name, and construct them."""

from importlib import import_module
from typing import Final

from meshrl.errors import ConfigError
from meshrl.run.trackers.base import Tracker
from meshrl.user_code import load_name, where_raised

SHIPPED: Final = {
    "tensorboard": "meshrl.run.trackers.tensorboard:TensorBoard",
    "wandb": "meshrl.run.trackers.wandb:Wandb",
    "mlflow": "meshrl.run.trackers.mlflow:Mlflow",
    "trackio": "meshrl.run.trackers.trackio:Trackio",
    "otlp": "meshrl.run.trackers.otlp:Otlp",
}
"""The shipped trackers and their places. All except the first need the extra of the same name."""


def make_tracker(name: str) -> Tracker:
    """Construct the tracker of this name. Raises ConfigError if there is none or it cannot be constructed."""
    try:
        return _class(name)()
    except ConfigError as error:
        raise ConfigError(f"run.log: {error}") from error.__cause__
    except ModuleNotFoundError as error:
        raise ConfigError(f"run.log: {name!r} needs the package {error.name!r}: {_remedy(name)}") from error
    except Exception as error:  # a library or a user's code may raise anything
        raise ConfigError(f"run.log: the tracker {name!r} could not be made: {where_raised(error)}") from error


def _remedy(name: str) -> str:
    return f"pip install 'meshrl[{name}]'" if name in SHIPPED else "install it, or take the tracker out"


def _class(name: str) -> type[Tracker]:
    if name in SHIPPED:
        module, _, attribute = SHIPPED[name].partition(":")
        found: object = getattr(import_module(module), attribute)
    else:
        found = load_name("tracker", name, SHIPPED, _is_tracker)
    if isinstance(found, type) and issubclass(found, Tracker):
        return found
    raise ConfigError(f"tracker {name!r} is not a class that inherits from meshrl.Tracker")


def _is_tracker(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Tracker) and value is not Tracker
