"""A server of the Tinker API, so that programs for its SDK train and sample on meshrl's models.

The requests of a model are ordered by the client's numbers, and written to a journal before they are acknowledged: each
is applied once, whatever connection or process is lost. `library` keeps what belongs to each tenant on disk, `service`
does what clients ask, and `app` is its HTTP. It needs `pip install 'meshrl[tinker]'`, and is loaded on first use.
"""

from typing import TYPE_CHECKING

from meshrl.tinker.config import ServedConfig, TenantConfig, TinkerConfig

__all__ = ["Replayed", "ServedConfig", "TenantConfig", "TinkerConfig", "replay", "serve", "serving"]

if TYPE_CHECKING:
    from meshrl.tinker.repeat import Replayed, replay
    from meshrl.tinker.serve import serve, serving
else:
    from importlib import import_module

    from meshrl.errors import BackendError

    _MODULES = {"serve": "serve", "serving": "serve", "replay": "repeat", "Replayed": "repeat"}

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"meshrl.tinker.{_MODULES[name]}"), name)
        except ModuleNotFoundError as error:
            raise BackendError(
                f"the server needs the package {error.name!r}, which is not installed: pip install 'meshrl[tinker]'"
            ) from error
