"""The `[run]` table of a configuration."""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from meshrl.config import CODE, Config, PathIn
from meshrl.errors import ConfigError
from meshrl.mesh import INLINE_BYTES, PATIENCE, Resources
from meshrl.roles import RoleConfig, SamplerConfig, Shape


class MeshConfig(Config):
    """A named mesh: its number of ranks, and the resources of each rank."""

    ranks: int = Field(default=1, ge=1, le=65_536)
    """Number of ranks."""
    min_ranks: int | None = Field(default=None, ge=1)
    """Lowest number of ranks that the run can start and continue with. Only for meshes of samplers. By default all
    ranks must be there."""
    axes: Shape = Field(default={})
    """Name and size of each axis of ranks. The last axis varies fastest. Default: `dp = ranks`."""
    cpus: int | None = Field(default=None, ge=0)
    """CPU cores of each rank. By default the mesh's ranks share the free cores. 0 reserves none."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each rank. Below 1, a share of one GPU."""
    custom: dict[str, float] = Field(default={})
    """Custom resources of each rank, by the names that the Ray cluster gives them."""
    gib: float | None = Field(default=None, gt=0)
    """GiB of memory that a rank may use, on its GPU, or on the machine if it has no GPU. `meshrl check` warns about
    roles that need more, and `meshrl memory` shows how much is free."""
    placement: Literal["pack", "spread"] = "pack"
    """`pack` puts ranks on few machines, `spread` on many."""

    @property
    def resources(self) -> Resources:
        """The resources of each rank."""
        return Resources(self.cpus, self.gpus, self.custom, self.placement, self.min_ranks or 0)

    def check_takes(self, role: RoleConfig) -> None:
        """ConfigError if the mesh may lose ranks (`min_ranks`) and the role cannot continue without them."""
        if self.min_ranks and not isinstance(role, SamplerConfig):
            raise ConfigError(
                f"the mesh {role.mesh!r} has min_ranks = {self.min_ranks}, and the {role.role or type(role).__name__} "
                "would lose a part of itself with each lost rank: use `min_ranks` only for meshes of samplers"
            )

    @model_validator(mode="after")
    def _resources_exist(self) -> Self:
        try:
            _ = self.resources
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _axes_fit(self) -> Self:
        if self.axes and prod(self.axes.values()) != self.ranks:
            raise ValueError(
                f"the axes {self.axes} multiply to {prod(self.axes.values())}, not to ranks = {self.ranks}"
            )
        return self

    @model_validator(mode="after")
    def _may_shrink(self) -> Self:
        if self.min_ranks and self.min_ranks > self.ranks:
            raise ValueError(f"min_ranks = {self.min_ranks} is more than ranks = {self.ranks}: lower it")
        if self.min_ranks and self.axes.get("dp", self.ranks) != self.ranks:
            raise ValueError(
                f"min_ranks = {self.min_ranks} lets single ranks come and go, but with the axes {self.axes} some ranks "
                "work together: use the axis dp only"
            )
        return self


def usual_engine(run: Mapping[str, object]) -> str:
    """Return the default engine of a run. Several meshes in one process would wait for each other."""
    meshes = cast("Mapping[str, MeshConfig]", run.get("meshes", {}))
    return "processes" if len(meshes) > 1 or any(mesh.gpus for mesh in meshes.values()) else "local"


class RunConfig(Config):
    """The `[run]` table of a configuration."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """Name of the run. Its files are in `folder/name`."""
    folder: str = "runs"
    """The folder of all runs. A relative path starts at the current folder, even if a file names it. The run records
    the absolute path in its configuration."""
    seed: int = 0
    """Seed of the order of the data, and of each role that sets no seed."""
    meshes: dict[str, MeshConfig] = Field(default={})
    """The meshes that roles refer to, by name. A mesh without a table has one rank and uses the free cores."""
    engine: str = Field(default_factory=usual_engine, pattern=r"^(local|processes|ray|auto|[\w.-]+:\d+)$")
    """Where ranks run. `local`: threads of this process. `processes`: processes of this machine. `ray`: the Ray cluster
    at RAY_ADDRESS, or a new one on this machine for the run. `HOST:PORT`: the Ray cluster there. `auto`: the Ray
    cluster that runs on this machine. Default: `processes` if there are several `meshes` or one with GPUs, else
    `local`."""
    inline_bytes: int = Field(default=INLINE_BYTES, ge=0)
    """A result's column with more bytes than this on a rank stays on that rank, and is loaded where it is read."""
    shared_memory_mib: int | None = Field(default=None, ge=1)
    """MiB of `/dev/shm` that all processes of the run together may use on each machine. Data beyond it goes through
    files in the temporary folder. Default: all that is free."""
    patience: float = Field(default=PATIENCE, gt=0)
    """Seconds to wait for an unreachable host before its ranks count as lost (engine Ray)."""
    deterministic: bool = False
    """Record the schedule of rollouts in schedule.jsonl, so that `replay` can repeat the run bit by bit."""
    replay: Annotated[str | None, PathIn("(.+)")] = None
    """Folder of a deterministic run of the same configuration. This run follows its schedule."""
    slow_after: float = Field(default=60.0, gt=0)
    """Seconds after which the log names a call that is still running, and its rank."""
    log: Annotated[str, CODE] | list[Annotated[str, CODE]] = "tensorboard"
    """One or several trackers that receive numbers, samples and the report: `tensorboard`, `wandb`, `mlflow`,
    `trackio`, or your own as `file.py:Name` (see `meshrl.Tracker`)."""
    otlp: str | None = Field(default=None, pattern=r"^https?://.+")
    """Address of an OpenTelemetry collector, such as http://127.0.0.1:4318. Each step is sent as a trace of calls and
    waits, by OTLP over HTTP."""
    project: str | None = None
    """Project of the run at the trackers. Default: the project in the tracker's environment variable, or `meshrl`."""
    samples_every: int = Field(default=20, ge=1)
    """Steps between two samples of prompts, completions and rewards."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints. One more is written after the last step. By default there are no checkpoints."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    checkpoint_async: bool = False
    """Continue training while a checkpoint is written. Steps wait only while the state is copied."""
    resume: bool = False
    """Continue from the newest checkpoint in the run's folder, or start from the beginning if there is none."""
    restarts: int = Field(default=0, ge=0)
    """Number of times that the run restarts by itself, from the newest checkpoint and on new ranks, after it has lost a
    rank's process or a device. An error in a script, a reward or a configuration always ends the run."""
    restart_wait: float = Field(default=600.0, ge=0)
    """Seconds that a restart waits for resources for each mesh, such as a machine that comes back."""

    @property
    def trackers(self) -> list[str]:
        """The trackers that `log` names, and that of `otlp`."""
        return [*([self.log] if isinstance(self.log, str) else self.log), *(["otlp"] if self.otlp else [])]

    @model_validator(mode="after")
    def _traces_have_an_address(self) -> Self:
        if "otlp" in ([self.log] if isinstance(self.log, str) else self.log):
            raise ValueError(
                'otlp is not a tracker for log: set otlp = "http://127.0.0.1:4318", the address of a collector'
            )
        return self

    @model_validator(mode="after")
    def _engine_has_what_meshes_ask_for(self) -> Self:
        for name, mesh in self.meshes.items():
            if self.engine == "local" and (mesh.gpus or mesh.custom):
                raise ValueError(
                    f"meshes.{name} asks for GPUs or custom resources, and the local engine has only threads: set "
                    'run.engine = "processes", or "ray" for several machines'
                )
        return self

    @model_validator(mode="after")
    def _restarts_have_checkpoints(self) -> Self:
        if self.restarts and self.checkpoint_every is None:
            raise ValueError(
                f"restarts = {self.restarts} needs a checkpoint to restart from, and none is written: set "
                "checkpoint_every = 50, or leave restarts out"
            )
        return self

    @model_validator(mode="after")
    def _follows_a_schedule_from_its_beginning(self) -> Self:
        if (self.resume or self.restarts) and (self.deterministic or self.replay):
            named = "deterministic = true records" if self.deterministic else "replay follows"
            other = "resume = true continues" if self.resume else f"restarts = {self.restarts} continues"
            raise ValueError(
                f"{named} the schedule of a whole run, but {other} from the middle of one: remove one of the two. "
                "With ahead = 0 the seed alone repeats a run"
            )
        return self
