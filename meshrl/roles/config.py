"""The configuration tables of roles: backend, mesh and model, and how a role trains."""

import json
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from meshrl.config import Config, PathIn
from meshrl.errors import BackendError, ConfigError
from meshrl.hub import HUB_ID
from meshrl.roles.registry import BackendOptions, backends, models_of, options_schema

C = TypeVar("C", bound="RoleConfig")
S = TypeVar("S", bound=BackendOptions)

Shape: TypeAlias = dict[str, Annotated[int, Field(gt=0)]]
"""Each axis of ranks and its size, the last one fastest."""


def _of_a_backend(name: str) -> str:
    if name not in backends():
        raise PydanticKnownError("extra_forbidden")
    return name


class RoleConfig(Config):
    """What every role's table has: who implements it and where it runs.

    A table in it that is named after an installed backend has that backend's own options, which `options_of` reads and
    `with_options` sets; those of the backend that is chosen are always there.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")
    # As pydantic asks for it: narrower than in its base.
    __pydantic_extra__: dict[  # pyright: ignore[reportIncompatibleVariableOverride]
        Annotated[str, AfterValidator(_of_a_backend)], object
    ] = Field(init=False)

    role: ClassVar[str] = ""
    """The name of the role that the table is for."""

    backend: str = "torch"
    mesh: str = "main"
    """Roles that name the same mesh share its ranks; a name of its own is a mesh of its own."""
    axes: Shape = Field(default={})
    """How this role sees its mesh's ranks, the last one fastest; nothing means the mesh's own axes."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that a call may take, or a stream's next value, before it ends as `CallTimeout`; none without it."""

    @classmethod
    def open_tables(cls) -> Mapping[str, type[BackendOptions]]:
        """The options that installed backends have for the role, by the backend's name."""
        found: dict[str, type[BackendOptions]] = {}
        for backend in backends():
            with suppress(BackendError):  # of one that cannot be loaded nothing is known, and nobody has chosen it
                if schema := cls._options_schema(backend):
                    found[backend] = schema
        return found

    @classmethod
    def _options_schema(cls, backend: str) -> type[BackendOptions] | None:
        return options_schema(cls.role, backend)

    @model_validator(mode="after")
    def _reads_options(self, info: ValidationInfo) -> Self:
        given = self.model_extra
        if given is None:  # a subclass takes no tables beside its fields
            return self
        named = {*given, self.backend} & backends().keys()
        schemas = {name: schema for name in sorted(named) if (schema := self._options_schema(name))}
        if given or schemas:
            fields: dict[str, Any] = {name: (schema, schema()) for name, schema in schemas.items()}
            tables = create_model("Options", __base__=Config, **fields)
            if info.mode == "json":  # strict, as `validate` reads the table itself
                given.update(tables.model_validate_json(json.dumps(given), strict=True))
            else:
                given.update(tables.model_validate(given))
        return self


def options_of(config: RoleConfig, schema: type[S]) -> S:
    """A backend's own options in a role's table: `options_of(config, FsdpConfig).replicate`."""
    tables = config.model_extra or {}
    found = [each for each in (tables.get(config.backend), *tables.values()) if isinstance(each, schema)]
    return found[0] if found else schema()


def chosen_options(config: RoleConfig) -> BackendOptions:
    """Those of the backend that the table names."""
    found = (config.model_extra or {}).get(config.backend)
    return found if isinstance(found, BackendOptions) else BackendOptions()


def with_options(config: C, *options: BackendOptions) -> C:
    """The table with these options of backends: `with_options(PolicyConfig(model="folder"), FsdpConfig(replicate=2))`.

    ConfigError where no backend has such for the role.
    """
    names = {schema: name for name, schema in config.open_tables().items()}
    for each in options:
        if type(each) not in names:
            raise ConfigError(
                f"{type(each).__name__}: no backend that is installed has these options for a {type(config).__name__}"
            )
    return config.model_copy(update={names[type(each)]: each for each in options})


def check_axes(config: RoleConfig, ranks: int) -> None:
    """ConfigError where a role's axes do not multiply to the ranks of its mesh."""
    if config.axes and prod(config.axes.values()) != ranks:
        raise ConfigError(
            f"the axes {config.axes} multiply to {prod(config.axes.values())}, and the mesh {config.mesh!r} has "
            f"ranks = {ranks}: take sizes that multiply to it, or set run.meshes.{config.mesh}.ranks"
        )


class NewModel(Config):
    """A small Llama with a character tokenizer, made from scratch with random weights."""

    characters: str
    hidden_size: int = Field(default=64, gt=0)
    ffn_size: int = Field(default=192, gt=0)
    layers: int = Field(default=3, gt=0)
    heads: int = Field(default=4, gt=0)
    max_tokens: int = Field(default=64, gt=0)
    """The longest sequence, in tokens."""
    chat_template: str | None = None
    """Of the tokenizer, in Jinja. What the model writes in a turn ends with `eos_token`."""


class ModelConfig(RoleConfig):
    """A role that holds a model."""

    model: Annotated[str | NewModel, PathIn(r"(?!package:)(.+)", name=HUB_ID)]
    """A folder of Hugging Face's or peft's, a .gguf file (`package:NAME/FILE`: inside an installed package), a model of
    the hub (`ORG/NAME` or `ORG/NAME@REVISION`, where no such folder is), or a table."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What passes are computed in, and what a policy publishes. Each backend's optimizer steps in float32."""
    chat: bool = False
    """Wrap each prompt as one user message in the tokenizer's chat template."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Variables of the chat template, such as `enable_thinking`."""
    seed: int = 0

    @property
    def template(self) -> Mapping[str, JsonValue] | None:
        """The variables of the chat template that prompts are wrapped in; None where they stay as they are."""
        return self.chat_template_kwargs if self.chat else None


class OptimizerConfig(Config):
    """AdamW with a warm-up."""

    lr: float = Field(default=1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up; `linear` and `cosine` fall to zero at `total_steps`."""
    total_steps: int | None = Field(default=None, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _falls_to_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(
                f'schedule = "{self.schedule}" falls to zero at total_steps, which is not set: set it to the number of '
                "optimizer steps"
            )
        return self


class LoraConfig(Config):
    """Low-rank adapters (arXiv:2106.09685), which alone are trained: W + alpha / rank * B A."""

    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=32, gt=0)
    targets: tuple[str, ...] = ()
    """Names of layers, such as `q_proj`; none means all linear layers but the head."""
    sync: Literal["merged", "adapters"] = "merged"
    """What samplers are given: whole weights, or the adapters alone, which they put beside weights of their own."""


class PolicyConfig(ModelConfig):
    """A model that is trained."""

    role = "Policy"

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """The most tokens in one forward and backward pass; a longer row has a pass of its own."""
    activation_checkpointing: bool = False
    lora: LoraConfig | None = None
    """Train adapters; nothing means all parameters."""
    delta_sync: bool = False
    """Send what changed alone to samplers of other machines, without loss; it keeps a copy of the last weights."""
    broadcast_sync: bool = False
    """Each rank broadcasts its own shards to all samplers at once, and keeps no copy; for `torch` and `fsdp`."""
    bucket_mib: int = Field(default=256, gt=0)
    """What `broadcast_sync` sends at once, in MiB: two are under way, in the memory of each who sends and receives."""

    @model_validator(mode="after")
    def _sends_one_way(self) -> Self:
        if self.broadcast_sync and (self.delta_sync or self.lora):
            other = "delta_sync" if self.delta_sync else "lora"
            raise ValueError(f"broadcast_sync sends all weights as they are, without {other}: leave one of the two out")
        return self


class CriticConfig(ModelConfig):
    """A model with a value head that is trained."""

    role = "Critic"

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """As a policy's."""


class ReferenceConfig(ModelConfig):
    """A frozen model."""

    role = "Reference"

    micro_batch_tokens: int = Field(default=16384, gt=0)


class TeacherConfig(ReferenceConfig):
    """A frozen model that a policy learns from: it names a model of its own, with the policy's tokens."""


class RewardModelConfig(ModelConfig):
    """A frozen model that judges. With `chat`, prompt and completion are a user's and an assistant's message."""

    role = "Reward"

    micro_batch_tokens: int = Field(default=16384, gt=0)
    """As a policy's."""

    @field_validator("backend")
    @classmethod
    def _holds_a_model(cls, backend: str) -> str:
        if backend in backends() and models_of(backend) == "none":
            raise ValueError(
                "calls a Python function and takes no model: leave `model` out, or give a backend that holds one, "
                'such as "torch"'
            )
        return backend

    @field_validator("model")
    @classmethod
    def _has_learned_to_judge(cls, model: str | NewModel) -> str | NewModel:
        if isinstance(model, NewModel):
            raise ValueError("a new model's rewards would be random: give the folder of a model that judges")
        return model


class RewardTrainingConfig(ModelConfig):
    """A model that learns to judge: one that judges already, or a policy's, which is given a head whose scores are 0.

    With `chat`, prompt and completion are a user's and an assistant's message.
    """

    role = "RewardModel"

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """As a policy's."""


class SamplerConfig(ModelConfig):
    """A model that generates."""

    role = "Sampler"

    slots: int = Field(default=512, gt=0)
    """Sequences decoded at once on a rank; a finished one gives its slot to the next."""
    lora: LoraConfig | None = None
    """The policy's, where its `sync` is "adapters"; filled in by an algorithm's configuration."""
    record_experts: bool = False
    """Tell which experts of a mixture read each token, so that the policy sends it to the same."""
