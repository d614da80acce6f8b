"""The engine of a run, told what the roles of its configuration are made of."""

from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from meshrl.engines import make_engine
from meshrl.errors import BackendError
from meshrl.mesh import Engine
from meshrl.roles import packages_of, place_of
from meshrl.run.config import RunConfig


def engine_of(config: RunConfig, resolved: Mapping[str, object]) -> Engine:
    """The engine; where ranks are forked, with what their roles are made of, and on nodes what these must have."""
    modules, packages = set[str](), set[str]()
    for name, table in resolved.items():
        backend = cast("Mapping[str, object]", table).get("backend") if isinstance(table, Mapping) else None
        if isinstance(backend, str):
            with suppress(BackendError):  # told where the role is spawned
                modules.add(place_of(name.title().replace("_", ""), backend).partition(":")[0])
            options = cast("Mapping[str, object]", table).get(backend)
            if not (isinstance(options, Mapping) and options.get("python")):  # of an environment of its engine's own
                packages |= packages_of(backend)
    how = config.inline_bytes, sorted(modules), config.shared_memory_mib, config.patience, sorted(packages)
    return make_engine(config.engine, *how)
