"""Watch a live run in a browser: its report on 127.0.0.1, which grows with the run's files.

`Watcher` follows the files and sends updates to each browser. It needs `pip install 'meshrl[watch]'`, and is loaded on
first use.
"""

from typing import TYPE_CHECKING

from meshrl.watch.choosing import run_to_watch

__all__ = ["Watcher", "run_to_watch"]

if TYPE_CHECKING:
    from meshrl.watch.server import Watcher
else:
    from importlib import import_module

    from meshrl.errors import BackendError

    def __getattr__(name: str) -> object:
        if name != "Watcher":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return import_module("meshrl.watch.server").Watcher
        except ModuleNotFoundError as error:
            raise BackendError(
                f"meshrl watch needs the package {error.name!r}, which is not installed: pip install 'meshrl[watch]'"
            ) from error
