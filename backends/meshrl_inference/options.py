"""What the tables of these backends have in common, `[sampler.vllm]` and the like."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from meshrl.config import PathIn
from meshrl.errors import BackendError
from meshrl.roles import BackendOptions


class EngineOptions(BackendOptions):
    """How a backend runs its engines: one for each place along `dp`, over the ranks along `tp`."""

    python: Annotated[str | None, PathIn("(.*/.*)")] = None
    """The interpreter of an environment that has the engine, with pins of its own; nothing means this one."""
    kv_cache_mib: int | None = Field(default=None, gt=0)
    """Memory for keys and values; nothing means what `memory_share` leaves, and on a CPU 512."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Of a GPU's memory, how much the engine may take."""
    eager: bool = False
    """No CUDA graphs: quicker to start, slower to decode."""
    sleep: bool = False
    """Give the GPU's memory back while no row is decoded: for a sampler on the mesh of what trains, and `ahead` = 0."""
    after_load: Literal["recompute", "keep"] = "recompute"
    """What running rows have of tokens before new weights: read again with these, or kept as the old ones left it."""

    @property
    def lends_memory(self) -> str:
        """The key `sleep`, where it is set."""
        return "sleep" if self.sleep else ""

    @property
    def own(self) -> dict[str, bool]:
        """The options that this engine has alone."""
        return self.model_dump(exclude=set(EngineOptions.model_fields))


def check_here(package: str, key: str) -> None:
    """BackendError where this environment has not an engine's package; `key` names another interpreter."""
    if find_spec(package) is None:
        raise BackendError(
            f"backend {package!r} needs the package {package!r}, which is not installed: pip install "
            f"'meshrl[{package}]', or name the interpreter of an environment that has it: {key}"
        )
