"""Engines run ranks as threads of this process (`local`), or processes of a machine (`processes`) or a cluster (`ray`).

All implement the protocol `mesh.Engine`. `make_engine` loads the named engine. The package itself loads none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from meshrl.errors import ConfigError
from meshrl.mesh import INLINE_BYTES, PATIENCE, Engine, Share, pool

__all__ = ["make_engine"]


def make_engine(
    name: str,
    inline_bytes: int = INLINE_BYTES,
    modules: Sequence[str] = (),
    shared_memory_mib: int | None = None,
    patience: float = PATIENCE,
    packages: Sequence[str] = (),
    code: Sequence[Path] = (),
    environment: Mapping[str, str] = {},
) -> Engine:
    """Make an engine by its name in `run.engine`.

    `inline_bytes`: size of the largest column that travels with a call. `modules`: the modules that ranks need, which
    the engine `processes` imports once for all. `shared_memory_mib`: most MiB for all processes of the engine,
    including this one. `patience`: seconds to wait for an unreachable node. `packages`: the packages of the roles'
    backends. Each node of Ray must have the versions that are here. `code`: folders that ranks import from, which are
    copied to other nodes. `environment`: variables that ranks on a cluster get. Raises ConfigError if the engine's own
    package is not installed.
    """
    pool.join(share := Share.of_run(shared_memory_mib), hands_on=name != "local")
    if name == "local":
        from meshrl.engines.local import LocalEngine  # noqa: PLC0415 -- loaded only if used

        return LocalEngine(inline_bytes=inline_bytes)
    if name == "processes":
        from meshrl.engines.processes import ProcessEngine  # noqa: PLC0415 -- as above

        return ProcessEngine(modules, inline_bytes, share)
    try:
        from meshrl.engines.ray import RayEngine  # noqa: PLC0415 -- as above; an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"run.engine = {name!r} needs the package {error.name!r}: pip install 'meshrl[ray]'"
        ) from None
    return RayEngine(None if name == "ray" else name, inline_bytes, share, patience, packages, code, environment)
