"""The `[run]` table of a configuration, and the keys that all algorithms share."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from types import NoneType
from typing import Annotated, Final, Literal, Self, TypeVar, cast, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshrl.config import CODE, Config, Keys, PathIn, expanded
from meshrl.data import Batch
from meshrl.errors import ConfigError
from meshrl.mesh import INLINE_BYTES, PATIENCE, Resources
from meshrl.roles import (
    MOST_COMPLETIONS,
    ModelConfig,
    Models,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    RoleConfig,
    SamplerConfig,
    Shape,
    TeacherConfig,
    backends,
    models_of,
)
from meshrl.tasks import RewardConfig, TaskConfig

C = TypeVar("C", bound=Config)


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
    def _check(self) -> Self:
        try:
            _ = self.resources
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.axes and prod(self.axes.values()) != self.ranks:
            raise ValueError(
                f"the axes {self.axes} multiply to {prod(self.axes.values())}, not to ranks = {self.ranks}"
            )
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
    environment: list[Annotated[str, Field(pattern=r"^\w[\w*?]*$")]] = Field(default=[])
    """Names of environment variables that ranks get from the process that starts the run, such as `["JUDGE_KEY",
    "HF_*"]`. Ranks on a Ray cluster that runs already need this. Values are not recorded. A pattern leaves out what
    the engine sets for each rank, such as CUDA_VISIBLE_DEVICES."""
    patience: float = Field(default=PATIENCE, gt=0)
    """Seconds to wait for an unreachable host before its ranks count as lost (engine Ray)."""
    deterministic: bool = False
    """Record the schedule of rollouts in schedule.jsonl, so that `replay` can repeat the run bit by bit."""
    replay: Annotated[str | None, PathIn("(.+)")] = None
    """Folder of a deterministic run of the same configuration. This run follows its schedule."""
    server: str | None = Field(default=None, pattern=r"^https?://.+")
    """Address of a server that `meshrl tinker` runs, such as http://127.0.0.1:8000. Policy and sampler are there, and
    the tables of the server say how they train and sample."""
    server_key_env: str = "TINKER_API_KEY"
    """Environment variable with the tenant's key at that server. The key itself is in no configuration."""
    slow_after: float = Field(default=60.0, gt=0)
    """Seconds after which the log names a call that is still running, and its rank."""
    log: Annotated[str, CODE] | list[Annotated[str, CODE]] = "tensorboard"
    """One or several trackers that receive numbers, samples and the report: `tensorboard`, `wandb`, `mlflow`,
    `trackio`, or your own as `file.py:Name` (see `meshrl.Tracker`). OpenTelemetry has its own key, `otlp`."""
    otlp: str | None = Field(default=None, pattern=r"^https?://.+")
    """Address of an OpenTelemetry collector, such as http://127.0.0.1:4318. Each step is sent as a trace of calls and
    waits, by OTLP over HTTP."""
    project: str | None = None
    """Project of the run at the trackers. Default: the project in the tracker's environment variable, or `meshrl`."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of 127.0.0.1 at which `/metrics` has the newest numbers of the run, in the text form of Prometheus. 0 takes
    a free one, which the log names. By default there is none."""
    samples_every: int = Field(default=20, ge=1)
    """Steps between two samples of the rows of a step, for `meshrl watch`, `report` and `compare`. The last step of
    the loop's count and each evaluation have one, too. A script that leaves its loop early has none at its end."""
    samples_rows: int = Field(default=16, ge=1)
    """Rows of a sample at most. Whole groups are kept, and a single group that is larger is cut."""
    samples_tokens: int = Field(default=65_536, ge=0)
    """Tokens of a sample whose log-probs, versions, advantages and other numbers are kept at most, about 60 bytes a
    token. Rows that find no room there are kept without them. 0 keeps none."""
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

    @field_validator("folder")
    @classmethod
    def _expanded(cls, folder: str) -> str:
        return expanded(folder)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "otlp" in ([self.log] if isinstance(self.log, str) else self.log):
            raise ValueError(
                'otlp is not a tracker for log: set otlp = "http://127.0.0.1:4318", the address of a collector'
            )
        for name, mesh in self.meshes.items():
            if self.engine == "local" and (mesh.gpus or mesh.custom):
                raise ValueError(
                    f"meshes.{name} asks for GPUs or custom resources, and the local engine has only threads: set "
                    'run.engine = "processes", or "ray" for several machines'
                )
        if self.restarts and self.checkpoint_every is None:
            raise ValueError(
                f"restarts = {self.restarts} needs a checkpoint to restart from, and none is written: set "
                "checkpoint_every = 50, or leave restarts out"
            )
        if (self.resume or self.restarts) and (self.deterministic or self.replay):
            whole = "deterministic = true records" if self.deterministic else "replay follows"
            partial = "resume = true continues" if self.resume else f"restarts = {self.restarts} continues"
            raise ValueError(
                f"{whole} the schedule of a whole run, but {partial} from the middle of one: remove one of the two. "
                "With ahead = 0 the seed alone repeats a run"
            )
        return self


class EvaluationConfig(Config):
    """Evaluation on held-out prompts while the run trains."""

    every: int = Field(ge=1)
    """Steps between two evaluations. The first is before the first step."""
    n: int = Field(default=4, ge=1, le=MOST_COMPLETIONS)
    """Completions for each prompt, for pass@k. A greedy completion is drawn in addition."""
    rows: int | None = Field(default=None, ge=1)
    """Evaluate only this number of held-out prompts, the first ones. Default: all."""
    threshold: float = 1.0
    """Lowest reward that counts as correct."""
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature. Default: that of the run's `sampling`."""
    seed: int = 0
    """Seed for sampling."""
    pause_training: bool = False
    """Pause training during an evaluation, so that one version of the weights samples all its tokens."""


_LEAST: Final = {"steps": 0, "prompts": 1, "rows": 1, "epochs": 1, "minibatches": 1, "ahead": 0, "kl": 0}
"""Keys that mean the same in every algorithm, and the lowest value of each."""
_OF_THE_POLICYS_MODEL: Final = ("dtype", "chat", "chat_template_kwargs")
"""Keys that each role with the policy's model inherits from it."""
_OF_A_READER: Final = ("backend", "model", "chat", "chat_template_kwargs")
"""Keys that a task takes from the policy, or from the first role with a model, to count tokens as that role does."""
_MOST_ROWS: Final = 2**22
"""Rows of one step at most: all of them are in memory at once."""


class AlgorithmConfig(Config):
    """The base of an algorithm's configuration.

    A role without a `model` uses the policy's, with its dtype and its chat template. A reward and a teacher do not.

    Validation refuses values that are too low for the keys `steps`, `prompts`, `rows`, `epochs`, `minibatches`, `ahead`
    and `kl`, if a script has them. It refuses a learning rate that reaches 0 before the last of
    `steps * epochs * minibatches` updates, and a step with more than 4,194,304 rows.
    """

    evaluation: EvaluationConfig | None = None
    """Evaluate held-out prompts during the run. By default, and with `~evaluation` on the command line, not at all."""

    @field_validator("*")
    @classmethod
    def _enough(cls, value: object, info: ValidationInfo) -> object:
        least = _LEAST.get(info.field_name or "")
        if least is not None and isinstance(value, int | float) and value < least:
            raise ValueError(f"must be greater than or equal to {least}")
        return value

    @model_validator(mode="after")
    def _rows_fit_in_memory(self) -> Self:
        prompts = getattr(self, "prompts", getattr(self, "rows", 1))
        n = getattr(getattr(self, "sampling", None), "n", 1)
        if isinstance(prompts, int) and isinstance(n, int) and prompts * n > _MOST_ROWS:
            product = f"{prompts:,} prompts with sampling.n = {n:,} are {prompts * n:,} rows"
            rows = product if n > 1 else f"{prompts:,} rows"
            raise ValueError(f"{rows} in a step, and a step has at most {_MOST_ROWS:,}: lower them")
        return self

    @model_validator(mode="after")
    def _learns_to_the_end(self) -> Self:
        steps, epochs, parts = (getattr(self, name, 1) for name in ("steps", "epochs", "minibatches"))
        updates = steps * epochs * parts
        for name in type(self).model_fields:
            optimizer = getattr(getattr(self, name), "optimizer", None)
            if not isinstance(optimizer, OptimizerConfig) or optimizer.schedule == "constant":
                continue
            if optimizer.total_steps is not None and optimizer.total_steps < updates:
                raise ValueError(
                    f"{name}.optimizer.total_steps = {optimizer.total_steps}: the learning rate is 0 after that, but "
                    f"the run makes {updates} updates (steps = {steps}, epochs = {epochs}, minibatches = {parts}): "
                    f"set total_steps to {updates}, or make fewer updates"
                )
        return self

    def examples(self, rows: Batch) -> Batch:
        """Return what the script learns of a task's rows, with `completion`, `messages` or `steps`, for `encode`.

        `check` makes the examples of all rows before a run, and counts their tokens. By default the rows have prompts
        alone. Raises DataError for a row that the script cannot learn from.
        """
        return rows

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """Return the table with the policy's model and the run's seed in each role with a model that sets none.

        A sampler also gets the policy's adapters whose `sync` is "adapters".
        """
        filled = dict(table)
        run, policy, task = table.get("run"), table.get("policy"), table.get("task")
        if isinstance(task, Mapping) and "max_prompt_tokens" in task and (counts := cls._first_model(table)):
            reader = {key: counts[key] for key in _OF_A_READER if key in counts}
            filled["task"] = {"reader": reader, **task}
        if isinstance(run, Mapping) and "seed" in run:
            for name, field in cls.model_fields.items():
                role = filled.get(name, {} if field.is_required() else None)
                if isinstance(role, Mapping) and _holds_a_model(field.annotation, role):
                    filled[name] = {"seed": run["seed"], **role}
        if not isinstance(policy, Mapping) or "model" not in policy:
            return filled
        lora = policy.get("lora")
        adapters = {"lora": lora} if isinstance(lora, Mapping) and lora.get("sync") == "adapters" else {}
        named = policy.get("adapters")
        if isinstance(named, Mapping):
            alone = {
                key: own for key, own in named.items() if isinstance(own, Mapping) and own.get("sync") == "adapters"
            }
            adapters |= {"adapters": alone} if alone or not named else {}
        shared = {key: policy[key] for key in _OF_THE_POLICYS_MODEL if key in policy}
        for name, field in cls.model_fields.items():
            kinds = _with_the_policys_model(field.annotation)
            role = filled.get(name, {} if field.is_required() else None)
            if isinstance(role, Mapping) and kinds:
                samples = any(issubclass(kind, SamplerConfig) for kind in kinds)
                own = shared if role.get("model", policy["model"]) == policy["model"] else {}
                filled[name] = {"model": policy["model"], **own, **(adapters if samples else {}), **role}
        return filled

    @classmethod
    def _first_model(cls, table: Mapping[str, object]) -> Mapping[str, object] | None:
        """The table of the policy, or of the first role that names a model if there is no policy."""
        roles = [table.get(name) for name in ("policy", *cls.model_fields)]
        return next((role for role in roles if isinstance(role, Mapping) and "model" in role), None)

    @classmethod
    def implied(cls, table: Mapping[str, object]) -> Collection[str]:
        """The roles that would use the policy's model, if it is missing."""
        policy, field = table.get("policy", {}), cls.model_fields.get("policy")
        if field is None or not field.is_required() or not isinstance(policy, Mapping) or "model" in policy:
            return ()
        roles = ((name, _with_the_policys_model(field.annotation)) for name, field in cls.model_fields.items())
        return [name for name, kinds in roles if kinds and name != "policy"]


class RolloutConfig(AlgorithmConfig):
    """The base configuration of algorithms whose policy learns from the rewards of its completions.

    An algorithm adds `sampling` and `loss`, and may change the default of a key.
    """

    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """The model that the KL penalty compares with. Most algorithms use it only if the weight of that penalty is above
    0."""
    ahead: int = 0
    """How many publications of weights rollouts may be behind the policy. Above 0, rollouts run while the
    policy trains."""
    prompts: int = 64
    """Prompts in a step. Each has `sampling.n` completions."""
    steps: int = 400
    """Training steps of the run."""


def _forms(annotation: object) -> tuple[list[object], list[type[ModelConfig]]]:
    """The types of table that a role may have, and those among them that hold a model."""
    forms = [form for form in get_args(annotation) or (annotation,) if form is not NoneType]
    return forms, [form for form in forms if isinstance(form, type) and issubclass(form, ModelConfig)]


def _holds_a_model(annotation: object, role: Mapping[str, object]) -> bool:
    """True if a role's table describes a role with a model."""
    forms, kinds = _forms(annotation)
    return bool(kinds) and (len(kinds) == len(forms) or "model" in role)


def _with_the_policys_model(annotation: object) -> Sequence[type[ModelConfig]]:
    """The types of table that a role may have, if each uses the policy's model unless it names one."""
    forms, kinds = _forms(annotation)
    others = any(issubclass(kind, RewardModelConfig | RewardTrainingConfig | TeacherConfig) for kind in kinds)
    return kinds if len(kinds) == len(forms) and not others else []


def tables_of(config: Config, above: Keys = ()) -> Iterator[tuple[Keys, Config]]:
    """Yield the configuration and each table in it, with its keys."""
    yield above, config
    for name in type(config).model_fields:
        value: object = getattr(config, name)
        if isinstance(value, Config):
            yield from tables_of(value, (*above, name))


def table_of(config: Config, name: str, kind: type[C]) -> C | None:
    """Return a table of the configuration if it has one of this kind."""
    table = getattr(config, name, None)
    return table if isinstance(table, kind) else None


def uses_model(table: RoleConfig) -> Models:
    """Say what a role's backend does with `model`: "perhaps" if it is not installed."""
    return models_of(table.backend) if table.backend in backends() else "perhaps"


def reads_reference(config: Config) -> bool:
    """True if the reference is read: the weight of a KL penalty is above 0."""
    weights = [getattr(table, key) for _, table in tables_of(config) for key in type(table).model_fields if key == "kl"]
    return any(weights) or not weights
