"""Load a user's code, such as a script or a reward function, by its path or name, and report its errors."""

import asyncio
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

import cloudpickle

from meshrl import log
from meshrl.errors import ConfigError, MachineFault, described, did_you_mean, is_discarded, is_of_machine

T = TypeVar("T")

if TYPE_CHECKING:
    from collections import ChainMap
    from pickle import Pickler as _Base  # the base of cloudpickle's, which ships no types
else:
    _Base = cloudpickle.Pickler

RAISED: Final = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions of a user's function that cost only its own row. `unless_cancelled` handles the last one."""


_PLACE: Final = "_meshrl_place"
"""The attribute of an exception that came from another process."""
_WAITS: Final = tuple(0.1 * 2**tries for tries in range(8))
"""Seconds that a call waits after each fault of the machine."""
_copies: dict[Path, Path] = {}
"""Folders on the controller's machine, and their copies on this one."""


def find_copies(copies: Mapping[Path, Path]) -> None:
    """Find files of these folders in their copies on this machine."""
    _copies.update(copies)


def copied(path: Path) -> Path:
    """Return this machine's copy of a file or a folder, or the path itself if there is no copy."""
    for folder, copy in _copies.items():
        if path.is_relative_to(folder) and (copy / path.relative_to(folder)).exists():
            return copy / path.relative_to(folder)
    return path


def copies_here() -> Mapping[Path, Path]:
    """Return the folders of the controller's machine, with their copies on this one."""
    return dict(_copies)


_INSTALLED = tuple(f"{Path(folder).resolve()}{os.sep}" for folder in set(sysconfig.get_paths().values()))
_checked: set[str] = {"__main__", "__mp_main__"}
_newest: tuple[int, str] | None = None
"""How many modules there were at the last look, and the newest one."""
_by_value: list[ModuleType] = []
_registers: list[Callable[[ModuleType], object]] = [cloudpickle.register_pickle_by_value]


def carry_scripts_with(register: Callable[[ModuleType], object]) -> None:
    """Register how another library that pickles carries a module by value."""
    if register not in _registers:
        for module in _by_value:
            register(module)
        _registers.append(register)


def pickle_scripts_by_value() -> None:
    """Pickle modules by value that another process could not import by name.

    Such a module is a script that was imported by its path. Each module is checked once.
    """
    global _newest  # noqa: PLW0603 -- one process has one `sys.modules`
    if _newest == (newest := (len(sys.modules), next(reversed(sys.modules)))):
        return
    _newest = newest
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
    if is_installed(file) if isinstance(file, str) else not getattr(module, "__path__", None):
        return True
    parent, folders = name.rpartition(".")[0], None
    if parent:
        package = sys.modules.get(parent)
        folders = getattr(package, "__path__", None)
        if package is None or folders is None or not _can_be_imported(parent, package):
            return False
    spec = next(filter(None, (finder.find_spec(name, folders) for finder in sys.meta_path)), None)
    if spec is None or file is None:
        return spec is not None
    return spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()


class _Source(SourceFileLoader):
    """Reads a file, never its bytecode: Python takes that for current if a change kept the file's second and size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path) -> ModuleType:
    """Run a Python file as a module. Its folder goes last on the import path, so it may import its neighbours.

    Raises ConfigError if the file does not exist or raises.
    """
    path = copied(path.absolute()).resolve()
    if not path.is_file():
        hint = did_you_mean(path.name, [each.name for each in path.parent.glob("*.py") if each.is_file()])
        raise ConfigError(f"there is no file {path}" + (hint and f"; {hint}"))
    # A distinct name: a user's `random.py` must not be taken for the library's module.
    name = f"meshrl_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file: its name must end in .py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    # Registered while it runs, so that its annotations and dataclasses can be resolved.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"running {path} failed: {where_raised(error)}") from error
    return module


_Reduce: TypeAlias = Callable[..., tuple[Callable[..., object], tuple[object, ...]]]
REDUCED: Final = cast("ChainMap[type, _Reduce]", cloudpickle.Pickler.dispatch_table).maps[0]
"""How cloudpickle reduces types in its own way."""


def _reduce_code(code: CodeType) -> tuple[Callable[..., object], tuple[object, ...]]:
    make, arguments = REDUCED[CodeType](code)
    return make, tuple([code.co_filename if each == "<dynamic-code>" else each for each in arguments])


class CodePickler(_Base):
    """cloudpickle's, which carries classes and functions of scripts by value. Their code keeps the name of its file."""

    def reducer_override(self, obj: object) -> object:  # type: ignore[override]
        """Reduce an object. Python 3.14 evaluates annotations here, and they may name what only checkers import."""
        if isinstance(obj, CodeType):
            return _reduce_code(obj)
        try:
            return super().reducer_override(obj)
        except NameError:
            cast("FunctionType", obj).__annotations__ = {}  # which no other process reads
            return super().reducer_override(obj)


def pickled(value: object) -> bytes:
    """Pickle a value with the code of scripts."""
    pickle_scripts_by_value()
    file = io.BytesIO()
    CodePickler(file, protocol=5).dump(value)
    return file.getvalue()


def signature_of(called: Callable[..., object]) -> inspect.Signature:
    """Return a signature. Annotations may name what only checkers import: Python 3.14 evaluates them when asked."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format  # noqa: PLC0415 -- earlier versions lack it

        return inspect.signature(called, annotation_format=Format.FORWARDREF)
    return inspect.signature(called)


def is_async(function: Callable[..., object]) -> bool:
    """True for an async function, even inside decorators, and for an object whose `__call__` is async."""
    whole = inspect.unwrap(function)
    return inspect.iscoroutinefunction(whole) or inspect.iscoroutinefunction(type(whole).__call__)


def unless_cancelled(error: BaseException) -> None:
    """Raise the error again if this task is being cancelled, as opposed to a CancelledError of the user's code."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def where_raised(error: BaseException) -> str:
    """`ValueError: what (file, line 3)`: the last line of a traceback, and its place if that is in the user's code."""
    place = place_of(error)
    return described(error) + (place and f" ({place})")


def set_place(error: BaseException, place: str) -> None:
    """Set what `place_of` returns for an exception of another process, which has no traceback here."""
    with suppress(Exception):  # its class may allow no attributes
        setattr(error, _PLACE, place)


def place_of(error: BaseException) -> str:
    """`file, line 3`. Empty if no line of the user's code is known, or the error's message contains it."""
    if place := getattr(error, _PLACE, ""):
        return str(place)
    ours = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    if isinstance(error, SyntaxError) or not frames:
        return ""
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def frames_of(error: BaseException, file: Path) -> list[traceback.FrameSummary]:
    """Return the lines of a traceback in the folder of a user's file."""
    folder = f"{file.resolve().parent}/"
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(folder) and not _is_of_meshrl(frame) and "/site-packages/" not in frame.filename
    ]


def is_of_meshrl(error: BaseException) -> bool:
    """True if meshrl or a backend raised the error, and not a user's code or a library that it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_of_meshrl(frames[-1])


def _is_of_meshrl(frame: traceback.FrameSummary) -> bool:
    core = Path(__file__).parent
    backend = re.escape(str(core.parent)) + r"/(?:backends/)?meshrl_\w+/"
    return frame.filename.startswith(f"{core}/") or re.match(backend, frame.filename) is not None


class FirstErrors:
    """Describes errors of a user's code, and logs the place of each kind once. Discarded rows are not logged."""

    def __init__(self, warning: str) -> None:
        """`warning`: the message of the log."""
        self._warning = warning
        self._reported: set[str] = set()

    def describe(self, error: BaseException) -> str:
        """Return the error as text of at most 500 characters."""
        text = described(error)[:500]
        # The place identifies a mistake. The message may contain a value of the row.
        place = place_of(error)
        if (kind := f"{type(error).__name__} {place}") not in self._reported and not is_discarded(error):
            self._reported.add(kind)
            log.warning(self._warning, error=text, **({"at": place} if place else {}))
        return text


_FAULTS: Final = FirstErrors("the machine has no room for a user's code, which is called again")


async def tried_again(call: Callable[[], Awaitable[T]]) -> T:
    """Return what a user's code gives. After a fault of the machine it is called again, later each time.

    Raises MachineFault if that did not help.
    """
    waits = list(_WAITS)
    while True:
        try:
            return await call()
        except RAISED as error:
            unless_cancelled(error)
            if not is_of_machine(error):
                raise
            if not waits:
                raise MachineFault(
                    f"the machine had no room {len(_WAITS) + 1} times in {sum(_WAITS):.0f} s: {where_raised(error)}. "
                    "Give it what it lacks, such as space (TMPDIR), open files (ulimit -n) or processes (ulimit -u), "
                    "or let less run at once (concurrency)"
                ) from error
            _FAULTS.describe(error)
        await asyncio.sleep(waits.pop(0))


def load_name(what: str, name: str, shipped: Collection[str], is_one: Callable[[object], bool]) -> object:
    """Return the object that `file.py:name` or `package.module:name` names. ConfigError, which says `what`, if none.

    Suggestions for a misspelt name come from `shipped`, and from the objects that `is_one` accepts.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon:
        hint = did_you_mean(name, shipped)
        raise ConfigError(
            f"{what} {name!r}: write {', '.join((*shipped, 'file.py:name'))} or package.module:name"
            + (hint and f"; {hint}")
        )
    try:
        names = vars(import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module))
    except ConfigError as error:
        raise ConfigError(f"{what} {name!r}: {error}") from error.__cause__
    except Exception as error:  # importing a package runs it, and that may raise anything
        raise ConfigError(f"{what} {name!r}: importing failed: {where_raised(error)}") from error
    if attribute not in names:
        known = [key for key, value in names.items() if is_one(value)]
        has = did_you_mean(attribute, known) or f"it has {', '.join(known) or 'none'}"
        raise ConfigError(f"{what} {name!r}: {module} has no {attribute!r}; {has}")
    found: object = names[attribute]
    return found
