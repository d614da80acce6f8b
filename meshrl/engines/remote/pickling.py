"""Pickling for ranks: classes of scripts are pickled by value, and exceptions may not be picklable."""

import copyreg
import io
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final, cast

import cloudpickle

from meshrl.mesh import Ref

if TYPE_CHECKING:
    from collections import ChainMap
    from pickle import Pickler as _Base  # the base of cloudpickle's, which ships no types
else:
    _Base = cloudpickle.Pickler

_INSTALLED = tuple(f"{Path(folder).resolve()}{os.sep}" for folder in set(sysconfig.get_paths().values()))
_checked: set[str] = {"__main__", "__mp_main__"}
_module_count = 0
_by_value: list[ModuleType] = []
_registers: list[Callable[[ModuleType], object]] = [cloudpickle.register_pickle_by_value]
_EVERYWHERE: Final = frozenset({"meshrl", "numpy"})
"""Packages that every rank can import."""
_NAMED: Final = type, FunctionType
_reduced_types: Final = cast("ChainMap[type, object]", cloudpickle.Pickler.dispatch_table).maps[0]
"""Types that cloudpickle reduces in its own way."""
_reference_types: list[type] = [Ref]
"""Types that cannot travel in an exception, because their store could not count them."""


def register_pickler(register: Callable[[ModuleType], object], reference: type) -> None:
    """Register another library that pickles: how it carries a module by value, and the type of its references."""
    if register not in _registers:
        for module in _by_value:
            register(module)
        _registers.append(register)
        _reference_types.append(reference)


def pickle_scripts_by_value() -> None:
    """Pickle modules by value that a rank could not import by name.

    Such a module is a script that was imported by its path. Each module is checked once.
    """
    global _module_count  # noqa: PLW0603 -- one process has one `sys.modules`
    if len(sys.modules) == _module_count:
        return
    _module_count = len(sys.modules)
    for name in sys.modules.keys() - _checked:
        module = sys.modules[name]
        if not _can_be_imported(name, module):
            _by_value.append(module)
            for register in _registers:
                register(module)
    _checked.update(sys.modules)


def is_installed(file: str) -> bool:
    """True if a module's file belongs to Python or an installed package."""
    # Unresolved first: resolving the paths of hundreds of modules takes longer than everything else.
    return file.startswith(_INSTALLED) or str(Path(file).resolve()).startswith(_INSTALLED)


def _can_be_imported(name: str, module: ModuleType) -> bool:
    """True if a process with the same import path finds the same file under this name."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or is_installed(file):
        return True
    parent = name.rpartition(".")[0]
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and folders is None:
        return False
    for finder in sys.meta_path:
        spec = finder.find_spec(name, folders)
        if spec is not None:
            return spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()
    return False


class Pickler(_Base):
    """cloudpickle's, which carries classes and functions of scripts by value, with fewer checks for each object."""

    def reducer_override(self, obj: object) -> object:  # type: ignore[override]
        """Reduce an object. cloudpickle looks each class and function up in its module, and all types in tables."""
        if isinstance(obj, _NAMED):
            return NotImplemented if _is_everywhere(obj) else super().reducer_override(obj)
        if type(obj) in _reduced_types or type(obj) in copyreg.dispatch_table:
            return NotImplemented
        return obj.__reduce_ex__(5)


def _is_everywhere(named: type | FunctionType) -> bool:
    """True if every rank finds it under its name. A wrapper may have the name of what it wraps."""
    module = sys.modules.get(named.__module__)
    known = module is not None and named.__module__.partition(".")[0] in _EVERYWHERE
    return known and getattr(module, named.__qualname__, None) is named


class _ExceptionPickler(Pickler):
    """Refuses references to a store: they would not be counted this way, nor freed."""

    def persistent_id(self, value: object) -> None:
        """Replace nothing."""
        if isinstance(value, tuple(_reference_types)):
            raise TypeError("a reference cannot travel in an exception")


def pickled_error(error: BaseException) -> bytes | None:
    """Return the exception as bytes. None if it cannot be pickled, or not be made again from that."""
    file = io.BytesIO()
    try:
        _ExceptionPickler(file).dump(error)
        return file.getvalue() if unpickled_error(file.getvalue()) else None
    except Exception:  # noqa: BLE001 -- pickling a user's exception may raise anything
        return None


def unpickled_error(cause: bytes | None) -> BaseException | None:
    """Return the exception. None if this process cannot make it."""
    if cause is None:
        return None
    try:
        error: object = pickle.loads(cause)  # noqa: S301 -- from our own ranks
    except Exception:  # noqa: BLE001 -- its module may exist on the rank only
        return None
    return error if isinstance(error, BaseException) else None
