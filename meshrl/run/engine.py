"""Make the engine of a run, with the modules that its roles need."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from meshrl.engines import make_engine
from meshrl.errors import BackendError
from meshrl.mesh import Engine
from meshrl.roles import packages_of, place_of
from meshrl.run.config import RunConfig

_CODE: Final = re.compile(r"(?:\w+:)?(?P<file>[^\n]+\.py)(?::\w+)?|(?P<module>[A-Za-z_]\w*)[\w.]*:\w+")
"""References to a user's code: `file.py`, `file.py:name` or `package.module:name`."""


def engine_of(config: RunConfig, resolved: Mapping[str, object]) -> Engine:
    """Make the engine. Forked ranks preload the modules of their roles, and nodes must have them."""
    modules, packages = set[str](), set[str]()
    for name, table in resolved.items():
        backend = cast("Mapping[str, object]", table).get("backend") if isinstance(table, Mapping) else None
        if isinstance(backend, str):
            with suppress(BackendError):  # reported where the role is spawned
                modules.add(place_of(name.title().replace("_", ""), backend).partition(":")[0])
            options = cast("Mapping[str, object]", table).get(backend)
            if not (isinstance(options, Mapping) and options.get("python")):  # its engine has a separate environment
                packages |= packages_of(backend)
    how = config.inline_bytes, sorted(modules), config.shared_memory_mib, config.patience, sorted(packages)
    return make_engine(config.engine, *how, sorted({path.parent for path in _files_named(resolved)}))


def _files_named(value: object) -> Iterator[Path]:
    """Yield the Python files that a configuration names."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _files_named(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _files_named(each)
    elif isinstance(value, str) and (named := _CODE.fullmatch(value)):
        file = named["file"] or _file_of(named["module"])
        with suppress(OSError):  # a text that is not a path may exceed the length limit of paths
            if file and Path(file).is_file():
                yield Path(file)


def _file_of(module: str) -> str | None:
    """Return the file of a package or module, without importing it."""
    spec = find_spec(module) if module not in sys.modules else None  # else it is found among the imported modules
    return spec.origin if spec else None
