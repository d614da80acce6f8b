"""The `[run]` table of a configuration."""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from meshrl.config import Config, PathIn
from meshrl.errors import ConfigError
from meshrl.mesh import INLINE_BYTES, PATIENCE, Resources
from meshrl.roles import RoleConfig, SamplerConfig, Shape
from meshrl.user_code import CODE


class MeshConfig(Config):
    """One named mesh: how many ranks, and what each may use."""

    ranks: int = Field(default=1, ge=1, le=65_536)
    least: int | None = Field(default=None, ge=1)
    """Ranks with which a run begins and goes on, where others are lost, or not there yet: of a mesh of samplers."""
    axes: Shape = Field(default={})
    """The axes, the last one fastest; nothing means `dp = ranks`."""
    cpus: int | None = Field(default=None, ge=0)
    """This and what follows: as in `Resources`."""
    gpus: float = Field(default=0.0, ge=0)
    custom: dict[str, float] = Field(default={})
    gib: float | None = Field(default=None, gt=0)
    """GiB that a rank may hold: of its GPU, or of the machine's memory where it has none. With it `meshrl check` says
    where roles need more, and `meshrl memory` how much is left."""
    placement: Literal["pack", "spread"] = "pack"

    @property
    def resources(self) -> Resources:
        """What each rank may use."""
        return Resources(self.cpus, self.gpus, self.custom, self.placement, self.least or 0)

    def check_takes(self, role: RoleConfig) -> None:
        """ConfigError where ranks may come and go, and the role is none that goes on without some."""
        if self.least and not isinstance(role, SamplerConfig):
            raise ConfigError(
                f"the mesh {role.mesh!r} has least = {self.least}, and ranks that are lost would take a part of the "
                f"{role.role or type(role).__name__} along: such a mesh is for samplers alone"
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
        if self.least and self.least > self.ranks:
            raise ValueError(f"least = {self.least}, and there are ranks = {self.ranks} at most")
        if self.least and self.axes.get("dp", self.ranks) != self.ranks:
            raise ValueError(
                f"least = {self.least} lets ranks come and go one by one, and with the axes {self.axes} some work "
                "together: take dp alone"
            )
        return self


def usual_engine(run: Mapping[str, object]) -> str:
    """The engine of a run of these meshes, where none is asked for: one process would have them wait for each other."""
    meshes = cast("Mapping[str, MeshConfig]", run.get("meshes", {}))
    return "processes" if len(meshes) > 1 or any(mesh.gpus for mesh in meshes.values()) else "local"


class RunConfig(Config):
    """The `[run]` table of a configuration."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """The run's folder is `folder/name`."""
    folder: str = "runs"
    """Of all runs; one that is not absolute is where the command is typed, whichever file names it. What a run records
    of its configuration has it absolute."""
    seed: int = 0
    """Decides the order of the data, and is the seed of each role that has none of its own."""
    meshes: dict[str, MeshConfig] = Field(default={})
    """The meshes that roles name; one that is not here has one rank and the cores that are free."""
    engine: str = Field(default_factory=usual_engine, pattern=r"^(local|processes|ray|auto|[\w.-]+:\d+)$")
    """`local`: threads of this process. `processes`: processes of this machine. `ray`: the cluster at RAY_ADDRESS, or
    one of this machine's own for the run. HOST:PORT: the Ray cluster there; `auto`: the one that runs on this machine.
    Without it `processes` where `meshes` has more than one, or one with GPUs, else `local`."""
    inline_bytes: int = Field(default=INLINE_BYTES, ge=0)
    """Columns of more bytes a rank stay on the rank that made them, and are loaded where they are read."""
    shared_memory_mib: int | None = Field(default=None, ge=1)
    """MiB of `/dev/shm` that all processes of the run together may take on each machine; without it what there is. More
    goes through files of the temporary folder."""
    patience: float = Field(default=PATIENCE, gt=0)
    """Seconds after which another host that cannot be reached is given up, with the ranks on it (engine Ray)."""
    deterministic: bool = False
    """Keep the schedule of rollouts in schedule.jsonl, so that `replay` can repeat the run to the bit."""
    replay: Annotated[str | None, PathIn("(.+)")] = None
    """The folder of a deterministic run of the same configuration, whose schedule this one follows."""
    slow_after: float = Field(default=60.0, gt=0)
    """Seconds after which a line says which call is still running, and on which rank."""
    log: Annotated[str, CODE] | list[Annotated[str, CODE]] = "tensorboard"
    """The trackers that are told numbers, samples and the report, one or a list: `tensorboard`, `wandb`, `mlflow`,
    `trackio`, and those of one's own, `file.py:Name` (`meshrl.Tracker`)."""
    otlp: str | None = Field(default=None, pattern=r"^https?://.+")
    """The address of a collector of OpenTelemetry traces, such as http://127.0.0.1:4318: each step is a trace of calls
    and waits, by OTLP over HTTP."""
    project: str | None = None
    """What the run is filed under there; without it what the tracker's own environment variable says, or `meshrl`."""
    samples_every: int = Field(default=20, ge=1)
    """Steps between two samples of prompts, completions and rewards."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints, and one after the last step; without it none is written."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """How many of them stay, the newest."""
    checkpoint_async: bool = False
    """Train on while a checkpoint is written: steps wait for copies of the state alone."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's folder; begin anew where there is none."""
    restarts: int = Field(default=0, ge=0)
    """How often the run goes on by itself, from the newest checkpoint and on new ranks, where a rank's process is gone
    or what an actor computes with. An error of a script, a reward or a configuration ends it all the same."""

    restart_wait: float = Field(default=600.0, ge=0)
    """Seconds that it then waits for room for each mesh, as for a machine that comes back."""

    @property
    def trackers(self) -> list[str]:
        """Those of `log`, and that of `otlp`."""
        return [*([self.log] if isinstance(self.log, str) else self.log), *(["otlp"] if self.otlp else [])]

    @model_validator(mode="after")
    def _traces_have_an_address(self) -> Self:
        if "otlp" in ([self.log] if isinstance(self.log, str) else self.log):
            raise ValueError('traces go to the collector that otlp names: set otlp = "http://127.0.0.1:4318", not log')
        return self

    @model_validator(mode="after")
    def _engine_has_what_meshes_ask_for(self) -> Self:
        for name, mesh in self.meshes.items():
            if self.engine == "local" and (mesh.gpus or mesh.custom):
                raise ValueError(
                    f"meshes.{name} asks for more than threads, which is all that the local engine gives: set "
                    'run.engine = "processes", or "ray" for several machines'
                )
        return self

    @model_validator(mode="after")
    def _restarts_have_checkpoints(self) -> Self:
        if self.restarts and self.checkpoint_every is None:
            raise ValueError(
                f"restarts = {self.restarts} goes on from the newest checkpoint, and none is written: set "
                "checkpoint_every = 50, or leave restarts out"
            )
        return self

    @model_validator(mode="after")
    def _follows_a_schedule_from_its_beginning(self) -> Self:
        if (self.resume or self.restarts) and (self.deterministic or self.replay):
            named = "deterministic = true keeps" if self.deterministic else "replay follows"
            other = "resume = true goes" if self.resume else f"restarts = {self.restarts} go"
            raise ValueError(
                f"{named} the schedule of a whole run, and {other} on in the middle of one: leave one of "
                "them out. With ahead = 0 the seed alone repeats a run"
            )
        return self
