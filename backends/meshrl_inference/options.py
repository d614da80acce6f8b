"""Options that backends with inference engines share, as in `[sampler.vllm]`."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from meshrl.config import PathIn
from meshrl.errors import BackendError, DataError
from meshrl.roles import BackendOptions, RoleConfig, Sampling, options_of


class EngineOptions(BackendOptions):
    """How a backend runs its engines: one for each coordinate along `dp`, over the ranks along `tp`."""

    python: Annotated[str | None, PathIn("(.*/.*)")] = None
    """Path of the Python of an environment that has the engine, which may pin other versions. Default: this Python."""
    kv_cache_mib: int | None = Field(default=None, gt=0)
    """Memory for the KV cache in MiB. Default: what `memory_share` leaves, and 512 on a CPU."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine may use."""
    eager: bool = False
    """Use no CUDA graphs. Faster to start, slower to decode."""
    sleep: bool = False
    """Free the GPU's memory while no row is decoded. For a sampler that shares its mesh with training, with `ahead` =
    0."""
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of running rows after new weights arrive: `recompute` it with the new weights, or `keep` the old one."""

    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds that the engine has to start. Its kernels compile at the first start, which may take an hour."""
    args: Mapping[str, JsonValue] = Field(default={})
    """Further arguments of the engine, by its own names, such as `{ max_num_batched_tokens = 8192 }`. Unknown ones, and
    those that meshrl sets itself, are errors at the start."""

    @property
    def lends_memory(self) -> str:
        """The key `sleep` if it is set, else empty."""
        return "sleep" if self.sleep else ""

    @property
    def room(self) -> tuple[int, int | None]:
        """Most adapters whose rows are decoded in one step, and the highest rank of one. 0 if it takes none."""
        return 0, None

    @property
    def own(self) -> dict[str, bool | str | None]:
        """The options that only this engine has."""
        return self.model_dump(exclude=set(EngineOptions.model_fields))


def check_installed(config: RoleConfig) -> None:
    """BackendError if a table's engine is to run in this environment and is not installed."""
    if options_of(config, EngineOptions).python is None:
        check_here(config.backend, f"sampler.{config.backend}.python")


def check_here(package: str, key: str) -> None:
    """BackendError if this environment lacks an engine's package. `key` is the setting for another interpreter."""
    if find_spec(package) is None:
        raise BackendError(
            f"backend {package!r} needs the package {package!r}, which is not installed: pip install "
            f"'meshrl[{package}]', or set {key} to the Python of an environment that has it"
        )


def check_temperature(title: str, temperatures: tuple[float, float], sampling: Sampling) -> None:
    """Raise DataError if an engine does not support the temperature."""
    coldest, hottest = temperatures
    if sampling.temperature and not coldest <= sampling.temperature <= hottest:
        raise DataError(
            f"{title} cannot sample at temperature {sampling.temperature:g}: give 0, or {coldest:g} to {hottest:g}"
        )
