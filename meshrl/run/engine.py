"""The engine of a run, and waiting for resources after a machine has failed."""

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from meshrl import log
from meshrl.engines import make_engine
from meshrl.errors import BackendError, ConfigError, NoRoom
from meshrl.mesh import Engine, Mesh
from meshrl.roles import import_path, packages_of
from meshrl.run.config import RunConfig

_CODE: Final = re.compile(r"(?:\w+:)?(?P<file>[^\n]+\.py)(?::\w+)?|(?P<module>[A-Za-z_]\w*)[\w.]*:\w+")
"""References to a user's code: `file.py`, `file.py:name` or `package.module:name`."""

_OF_RANKS: Final = {
    re.compile(r"RAY_\w+"): "and Ray's own variables belong to the cluster: leave the name out",
    re.compile(r"\w+_VISIBLE_(?:DEVICES|CORES|CHIPS|MODULES)"): "which the engine sets for each rank: leave the name "
    "out, and ask for devices by `gpus` of a mesh",
}
"""Variables that the engine gives each rank, its place in the cluster and its devices, with why no user gives them."""
_RETRY_SECONDS: Final = 2.0
"""Seconds between two attempts to reserve a mesh."""
_LOG_SECONDS: Final = 60.0
"""Seconds between two log lines about the wait."""


def engine_of(config: RunConfig, resolved: Mapping[str, object]) -> Engine:
    """Make the engine. Forked ranks preload the modules of their roles, and nodes must have them."""
    modules, packages = set[str](), set[str]()
    for name, table in resolved.items():
        backend = cast("Mapping[str, object]", table).get("backend") if isinstance(table, Mapping) else None
        if isinstance(backend, str):
            with suppress(BackendError):  # reported where the role is spawned
                modules.add(import_path(name.title().replace("_", ""), backend).partition(":")[0])
            options = cast("Mapping[str, object]", table).get(backend)
            if not (isinstance(options, Mapping) and options.get("python")):  # its engine has a separate environment
                packages |= packages_of(backend)
    return make_engine(
        config.engine,
        config.inline_bytes,
        sorted(modules),
        config.shared_memory_mib,
        config.patience,
        sorted(packages),
        sorted({path.parent for path in _files_named(resolved)}),
        _environment(config.environment),
    )


def _environment(names: Sequence[str]) -> Mapping[str, str]:
    """Return the variables with these names. ConfigError for one that is not set here, or that ranks have anyway."""
    for pattern, why in _OF_RANKS.items():
        if own := [*filter(pattern.fullmatch, names)]:
            raise ConfigError(f"run.environment names {' and '.join(own)}, {why}")
    if unset := [name for name in names if not {*"*?"} & {*name} and name not in os.environ]:
        raise ConfigError(
            f"run.environment names {' and '.join(unset)}, which the environment of this process lacks: set it where "
            "the run is started, or leave the name out"
        )
    named = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, each) for each in names)}
    return {name: value for name, value in named.items() if not any(each.fullmatch(name) for each in _OF_RANKS)}


def _files_named(value: object) -> Iterator[Path]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _files_named(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _files_named(each)
    elif isinstance(value, str) and (named := _CODE.fullmatch(value)):
        file, module = named["file"], named["module"]
        if module and module not in sys.modules:  # imported modules are found without this
            spec = find_spec(module)  # without importing it
            file = spec.origin if spec else None
        with suppress(OSError):  # a text that is not a path may exceed the length limit of paths
            if file and Path(file).is_file():
                yield Path(file)


async def wait_for_resources(reserve: Callable[[], Awaitable[Mesh]], name: str, seconds: float) -> Mesh:
    """Reserve a mesh, and wait up to `seconds` for room. Raises NoRoom, which says what is missing, after that."""
    if not seconds:
        return await reserve()
    loop = asyncio.get_running_loop()
    end, logged, missing = loop.time() + seconds, -_LOG_SECONDS, ""
    try:
        async with asyncio.timeout_at(end):
            while True:
                try:
                    return await reserve()
                except NoRoom as error:
                    missing = str(error)
                if loop.time() - logged >= _LOG_SECONDS:
                    logged = loop.time()
                    log.warning(
                        f"a machine failed, and the others have no room for the mesh {name!r}: waiting "
                        f"{end - logged:.0f} s more (run.restart_wait)",
                        missing=missing,
                    )
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise NoRoom(
            f"a machine failed, and the mesh {name!r} found no room in the {seconds:g} s of run.restart_wait: "
            f"{missing or 'what it asks for is taken'}. Restore the machine and resume with run.resume = true, or "
            "wait longer"
        ) from None
