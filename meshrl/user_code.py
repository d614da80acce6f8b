"""Load a user's code, such as a script or a reward function, by its path or name, and report its errors."""

import asyncio
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from meshrl import log
from meshrl.config import PathIn
from meshrl.errors import ConfigError, described, did_you_mean

RAISED: Final = (Exception, SystemExit, asyncio.CancelledError)
"""What a user's function may raise that costs its own row alone; `unless_cancelled` tells the last one apart."""

CODE: Final = PathIn(r"(?:\w+:)?(.+\.py):.*")
"""Marks a key of a configuration that `load_name` reads, perhaps after a word and a colon."""


_copies: dict[Path, Path] = {}
"""Folders of the controller's machine, and where this one has copies of them."""


def find_copies(copies: Mapping[Path, Path]) -> None:
    """Have files of these folders found in their copies, which were brought to this machine."""
    _copies.update(copies)


def copied(path: Path) -> Path:
    """Where this machine has the copy of a file or a folder; the path itself where none was brought."""
    for folder, copy in _copies.items():
        if path.is_relative_to(folder) and (copy / path.relative_to(folder)).exists():
            return copy / path.relative_to(folder)
    return path


def import_file(path: Path) -> ModuleType:
    """Run a Python file as a module; its folder goes last on the import path, so it may import its neighbours.

    Raises ConfigError where there is no such file, or where running it raises.
    """
    path = copied(path.absolute()).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    # A name of its own: a user's `random.py` must not be taken for the library's module.
    name = f"meshrl_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file: its name must end in .py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    # Registered while it runs, so that annotations and dataclasses in it can be resolved.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"running {path} failed: {where_raised(error)}") from error
    return module


def unless_cancelled(error: BaseException) -> None:
    """Raise it again where it is this task that is cancelled, and not a CancelledError of the user's own."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def where_raised(error: BaseException) -> str:
    """`ValueError: what (file, line 3)`: the last line of a traceback, and its place where that is the user's."""
    place = _place(error)
    return described(error) + (place and f" ({place})")


def _place(error: BaseException) -> str:
    """`file, line 3`; empty where no line of the user's is known, or the error's own text tells it."""
    ours = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    if isinstance(error, SyntaxError) or not frames:
        return ""
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def frames_of(error: BaseException, file: Path) -> list[traceback.FrameSummary]:
    """The lines of a traceback in the folder of a user's file."""
    folder = f"{file.resolve().parent}/"
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(folder) and not _is_of_meshrl(frame) and "/site-packages/" not in frame.filename
    ]


def is_of_meshrl(error: BaseException) -> bool:
    """Whether it was raised by meshrl or a backend, not by a user's code or a library that this calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_of_meshrl(frames[-1])


def _is_of_meshrl(frame: traceback.FrameSummary) -> bool:
    core = Path(__file__).parent
    backend = re.escape(str(core.parent)) + r"/(?:backends/)?meshrl_\w+/"
    return frame.filename.startswith(f"{core}/") or re.match(backend, frame.filename) is not None


class FirstErrors:
    """Tells the errors of a user's code: each as a text, and where each kind arose in the log, the first time."""

    def __init__(self, warning: str) -> None:
        """`warning`: what the log says of one."""
        self._warning = warning
        self._told: set[str] = set()

    def told(self, error: BaseException) -> str:
        """The error as a text of at most 500 letters."""
        text = described(error)[:500]
        # The place tells one mistake from another; the text may hold a value of the row.
        place = _place(error)
        if (kind := f"{type(error).__name__} {place}") not in self._told:
            self._told.add(kind)
            log.warning(self._warning, error=text, at=place)
        return text


def load_name(what: str, name: str, shipped: Collection[str], is_one: Callable[[object], bool]) -> object:
    """The object that `file.py:name` or `package.module:name` names; ConfigError, with `what` it should be, if none.

    `shipped` and those that `is_one` are what a misspelt name may have meant.
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
