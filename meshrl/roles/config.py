"""The configuration tables of roles: backend, mesh, model, how the role trains, and how completions are sampled."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from math import prod
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, TypeVar

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
from meshrl.data import DEFAULT_ADAPTER, OnError
from meshrl.errors import BackendError, ConfigError
from meshrl.hub import HUB_ID
from meshrl.roles.registry import BackendOptions, backends, models_of, options_schema

C = TypeVar("C", bound="RoleConfig")
S = TypeVar("S", bound=BackendOptions)

Shape: TypeAlias = dict[str, Annotated[int, Field(gt=0)]]
"""The size of each axis of ranks. The last axis varies fastest."""


def _name_of_backend(name: str) -> str:
    if name not in backends():
        raise PydanticKnownError("extra_forbidden")
    return name


class RoleConfig(Config):
    """The keys of every role's table: which backend implements it, and where it runs.

    A subtable named after an installed backend holds that backend's options. `options_of` reads them and `with_options`
    sets them. The options of the chosen backend are always there.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")
    # Required by pydantic. Narrower than in its base.
    __pydantic_extra__: dict[  # pyright: ignore[reportIncompatibleVariableOverride]
        Annotated[str, AfterValidator(_name_of_backend)], object
    ] = Field(init=False)

    role: ClassVar[str] = ""
    """The name of the role that the table is for."""

    backend: str = "torch"
    """The backend that implements the role."""
    mesh: str = "main"
    """The mesh that the role runs on. Roles on the same mesh share its ranks."""
    axes: Shape = Field(default={})
    """The axes in which this role arranges the mesh's ranks. The last axis varies fastest. Default: the mesh's axes."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that a call, or the next value of a stream, may take before it raises `CallTimeout`. Default: no
    limit."""

    @classmethod
    def open_tables(cls) -> Mapping[str, type[BackendOptions]]:
        """The schema of each installed backend's options for this role, by the backend's name."""
        schemas: dict[str, type[BackendOptions]] = {}
        for backend in backends():
            with suppress(BackendError):  # a backend that cannot be loaded, and is not used
                if schema := cls._options_schema(backend):
                    schemas[backend] = schema
        return schemas

    @classmethod
    def _options_schema(cls, backend: str) -> type[BackendOptions] | None:
        return options_schema(cls.role, backend)

    @model_validator(mode="after")
    def _reads_options(self, info: ValidationInfo) -> Self:
        given = self.model_extra
        if given is None:  # the subclass accepts only its fields
            return self
        named = {*given, self.backend} & backends().keys()
        schemas = {name: schema for name in sorted(named) if (schema := self._options_schema(name))}
        if given or schemas:
            tables = _tables_of(tuple(schemas.items()))
            if info.mode == "json":  # strict, like `validate`
                given.update(tables.model_validate_json(json.dumps(given), strict=True))
            else:
                given.update(tables.model_validate(given))
        return self


@cache  # pydantic takes milliseconds to make one
def _tables_of(schemas: tuple[tuple[str, type[BackendOptions]], ...]) -> type[Config]:
    """The schema of a role's tables of options, by the backends' names."""
    fields: dict[str, Any] = {name: (schema, schema()) for name, schema in schemas}
    return create_model("Options", __base__=Config, **fields)


def options_of(config: RoleConfig, schema: type[S]) -> S:
    """Return a backend's options in a role's table: `options_of(config, FsdpConfig).replicate`."""
    tables = config.model_extra or {}
    found = (each for each in (tables.get(config.backend), *tables.values()) if isinstance(each, schema))
    return next(found, None) or schema()


def chosen_options(config: RoleConfig) -> BackendOptions:
    """Return the options of the backend that the table names."""
    options = (config.model_extra or {}).get(config.backend)
    return options if isinstance(options, BackendOptions) else BackendOptions()


def with_options(config: C, *options: BackendOptions) -> C:
    """Set options of backends in a role's table: `with_options(PolicyConfig(model="folder"), FsdpConfig(replicate=2))`.

    Returns the new table. Raises ConfigError if no backend has such options for the role.
    """
    names = {schema: name for name, schema in config.open_tables().items()}
    for kind in map(type, options):
        if kind not in names:
            raise ConfigError(f"{kind.__name__}: no installed backend has these options for a {type(config).__name__}")
    return config.model_copy(update={names[type(each)]: each for each in options})


def check_axes(config: RoleConfig, ranks: int) -> None:
    """Raise ConfigError unless a role's axes multiply to the number of ranks of its mesh."""
    if config.axes and prod(config.axes.values()) != ranks:
        raise ConfigError(
            f"the axes {config.axes} multiply to {prod(config.axes.values())}, and the mesh {config.mesh!r} has "
            f"ranks = {ranks}: choose sizes that multiply to it, or set run.meshes.{config.mesh}.ranks"
        )


class NewVision(Config):
    """The eyes of a new model, a small CLIP: an image is scaled to a square and read as patches."""

    image_size: int = Field(default=32, gt=0)
    """Width and height of the image that it reads, in pixels."""
    patch_size: int = Field(default=8, gt=0)
    """Width and height of a patch, in pixels. Each is one token."""
    hidden_size: int = Field(default=64, gt=0)
    """Size of its hidden states."""
    layers: int = Field(default=2, gt=0)
    """Number of its layers."""


class NewModel(Config):
    """A small Llama with random weights and a tokenizer with one token for each character."""

    characters: str
    """The characters that the tokenizer knows."""
    hidden_size: int = Field(default=64, gt=0)
    """Size of the hidden states."""
    ffn_size: int = Field(default=192, gt=0)
    """Size of the feed-forward layers."""
    layers: int = Field(default=3, gt=0)
    """Number of decoder layers."""
    heads: int = Field(default=4, gt=0)
    """Number of attention heads."""
    max_tokens: int = Field(default=64, gt=0)
    """The longest sequence, in tokens."""
    chat_template: str | None = None
    """Chat template of the tokenizer, in Jinja. The model's messages must end with `eos_token`."""
    vision: NewVision | None = None
    """Makes a small LLaVA of it, which sees images. Default: it does not."""


class ModelConfig(RoleConfig):
    """A role that holds a model."""

    model: Annotated[str | NewModel, PathIn(r"(?!package:)(.+)", name=HUB_ID)]
    """The model: a Hugging Face or peft folder, a .gguf file (`package:NAME/FILE` if it is inside an installed
    package), a model of the hub (`ORG/NAME` or `ORG/NAME@REVISION`, unless such a folder exists), or a table for a new
    model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of forward and backward passes, and of the weights that a policy publishes. Optimizers always compute
    in float32."""
    chat: bool = False
    """Wrap each prompt as one user message in the tokenizer's chat template."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Variables for the chat template, such as `enable_thinking`."""
    seed: int = 0
    """Random seed of the role. Default: `run.seed`."""

    @property
    def template(self) -> Mapping[str, JsonValue] | None:
        """The variables for the chat template, or None if prompts are not wrapped in one."""
        return self.chat_template_kwargs if self.chat else None


Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""The decay rate of a moment. At 1 its correction divides by zero."""


class OptimizerConfig(Config):
    """AdamW with a learning rate schedule."""

    lr: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    """Learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """AdamW's weight decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps in which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up. `linear` and `cosine` fall to zero at `total_steps`."""
    total_steps: int | None = Field(default=None, gt=0)
    """Optimizer step at which `linear` and `cosine` reach zero. Required for these two."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the gradient to this norm. None: no clipping."""

    @model_validator(mode="after")
    def _falls_to_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(
                f'schedule = "{self.schedule}" falls to zero at total_steps, which is not set: set it to the number of '
                "optimizer steps"
            )
        return self


class Step(Config):
    """AdamW's values for one step of a policy. One that is None comes from the policy's table."""

    lr: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Learning rate, regardless of the warm-up and the schedule."""
    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the first and second moment."""
    eps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """AdamW's epsilon."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """AdamW's weight decay."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the gradient to this norm. Infinity: no clipping."""

    def over(self, table: OptimizerConfig, lr: float) -> OptimizerConfig:
        """Return the values of a step: these, and else the table's, with the learning rate `lr` of its schedule."""
        return table.model_copy(update={"lr": lr, **self.model_dump(exclude_none=True)})


class LoraConfig(Config):
    """Low-rank adapters (arXiv:2106.09685): W + alpha / rank * B A. Only A and B are trained."""

    rank: int = Field(default=16, gt=0)
    """Rank of the matrices A and B."""
    alpha: int = Field(default=32, gt=0)
    """Scale of the adapters, which is divided by `rank`."""
    targets: str | tuple[str, ...] = ()
    """Names of the layers that get adapters, such as `q_proj`: linear layers, embeddings, the head. A text is a regular
    expression of whole names, or "all-linear". Default: all linear layers except the head."""
    sync: Literal["merged", "adapters"] = "merged"
    """What the policy sends to samplers: `merged` sends whole weights, `adapters` only the adapters, which samplers add
    to the model that they have loaded."""
    seed: int | None = None
    """Random seed of the first values. Default: the policy's."""
    optimizer: OptimizerConfig | None = None
    """The optimizer of these adapters, with its own schedule. Default: the policy's."""


def name_of_adapter(name: str) -> str:
    """Return the name of an adapter. ValueError if it cannot be one."""
    if not re.fullmatch(ADAPTER_NAME, name):
        raise ValueError(f"{name!r} is no name of an adapter: take letters, digits, `-`, `_` and `.`, at most 128")
    if name == DEFAULT_ADAPTER:
        raise ValueError(f"{name!r} is the adapter of rows that name none: declare it as `lora`")
    return name


ADAPTER_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
"""What the name of an adapter looks like. It is the name of a folder, too."""
NamedAdapters: TypeAlias = dict[Annotated[str, AfterValidator(name_of_adapter)], LoraConfig]
"""Adapters by name."""


Packing: TypeAlias = Literal["auto", "packed", "padded"]
"""How a model reads several rows in one pass."""


class PassConfig(ModelConfig):
    """A role whose model reads whole rows, many in one pass."""

    packing: Packing = "auto"
    """How `torch` and `fsdp` read the rows of a pass. `packed`: one after the other, without padding, and what they
    share once. `padded`: each by itself, through the model's own code. `auto`: packed if that is proved to compute the
    same for this model, and else padded."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What ranks along `dp` share equally: the tokens of a call's rows, or the floating-point operations that the model
    needs for them. `flops` counts attention, which costs more per token in longer rows."""


class PolicyConfig(PassConfig):
    """The model that is trained."""

    role = "Policy"

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens in one forward and backward pass at most. A longer row gets its own pass."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them. This saves memory and takes time."""
    train_vision: bool = False
    """Train what a vision-language model sees with, too: its tower and what joins it to the language model."""
    lora: LoraConfig | None = None
    """Train adapters. Default: train all parameters, unless there are `adapters`."""
    adapters: NamedAdapters | None = None
    """Named adapters on the same frozen base, each with a table like `lora`. Rows name theirs in a text column,
    `adapter`; those that name none are of `lora`. An empty table: all are added while the policy runs."""
    share_passes: bool = False
    """Read rows of several adapters in one pass if they are few. Faster, but then the last bits of an adapter's
    gradient depend on the rows of others."""
    weight_sync: Literal["auto", "delta", "broadcast"] = "auto"
    """How weights go to samplers. `auto`: a copy of all weights, by the shortest route that there is between the two
    sides. `delta`: to other machines only changes, without loss; keeps a copy of the last weights. `broadcast`: each
    rank of `torch`, `fsdp` or `megatron` broadcasts its shards to all samplers at once and keeps no copy."""
    weight_sync_dtype: Literal["auto", "fp8"] = "auto"
    """How the matrices of linear layers are broadcast. `auto`: in `dtype`. `fp8`: in 8 bits a number, with a scale for
    each row, for a sampler that has them in FP8 too. Each rank rounds the rows that it has whole."""
    bucket_mib: int = Field(default=256, gt=0)
    """Memory in MiB. Each sender and receiver of `weight_sync = "broadcast"` needs at most twice as much, for six
    buckets in flight. 4 MiB of that, or an eighth if that is less, stay free for plans and threads. In FP8, 12 MiB."""

    @property
    def is_adapted(self) -> bool:
        """True if the model is a frozen base of adapters."""
        return self.lora is not None or self.adapters is not None

    @property
    def declared(self) -> Mapping[str, LoraConfig]:
        """The adapters of the table, by name."""
        return {**({DEFAULT_ADAPTER: self.lora} if self.lora else {}), **(self.adapters or {})}

    @model_validator(mode="after")
    def _fits_adapters(self) -> Self:
        if self.weight_sync == "broadcast" and self.is_adapted:
            raise ValueError(
                'weight_sync = "broadcast" sends all weights, and cannot be combined with '
                f"{'lora' if self.lora else 'adapters'}: remove one of the two"
            )
        if self.train_vision and self.is_adapted:
            raise ValueError(
                "train_vision trains weights of the base, which adapters keep frozen: remove one of the two"
            )
        if self.weight_sync_dtype == "fp8" and self.weight_sync != "broadcast":
            raise ValueError('weight_sync_dtype = "fp8" is for broadcasts: set weight_sync = "broadcast", or remove it')
        return self


class CriticConfig(PassConfig):
    """A model with a value head. It is trained along with the policy."""

    role = "Critic"

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens in one forward and backward pass at most. A longer row gets its own pass."""


class ReferenceConfig(PassConfig):
    """A frozen model that the policy is compared with."""

    role = "Reference"

    micro_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens in one forward pass at most. A longer row gets its own pass."""


class TeacherConfig(ReferenceConfig):
    """A frozen model that the policy learns from. It must name a `model`, with the tokenizer of the policy."""


class RewardModelConfig(PassConfig):
    """A frozen model that scores completions.

    With `chat`, it reads prompt and completion as a user's and an assistant's message.
    """

    role = "Reward"

    micro_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens in one forward pass at most. A longer row gets its own pass."""
    errors: OnError = "mask"
    """What becomes of a row that the model cannot read, or whose score is not finite. `mask`: its reward is unknown, so
    nothing is learned from it. `zero`: its reward is 0. `stop`: the run ends."""

    @field_validator("backend")
    @classmethod
    def _holds_a_model(cls, backend: str) -> str:
        if backend in backends() and models_of(backend) == "none":
            raise ValueError(
                "calls a Python function and takes no model: remove `model`, or choose a backend that takes one, "
                'such as "torch"'
            )
        return backend

    @field_validator("model")
    @classmethod
    def _has_learned_to_judge(cls, model: str | NewModel) -> str | NewModel:
        if isinstance(model, NewModel):
            raise ValueError("a new model's rewards would be random: give the folder of a trained reward model")
        return model


class RewardTrainingConfig(PassConfig):
    """A reward model that is trained. It starts from a reward model, or from a language model with a new head of zeros.

    With `chat`, it reads prompt and completion as a user's and an assistant's message.
    """

    role = "RewardModel"

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens in one forward and backward pass at most. A longer row gets its own pass."""


class SamplerConfig(ModelConfig):
    """The model that generates completions."""

    role = "Sampler"

    slots: int = Field(default=512, gt=0)
    """Sequences that a rank decodes at once. When one is finished, the next takes its slot."""
    lora: LoraConfig | None = None
    """The policy's adapters, if their `sync` is "adapters". The algorithm's configuration fills it in."""
    adapters: NamedAdapters | None = None
    """The policy's named adapters of this kind, which prompts name in a text column, `adapter`. Others may be loaded
    later. The algorithm's configuration fills it in."""
    record_experts: bool = False
    """Record the experts that each token of a mixture-of-experts model is routed to, so that the policy uses the
    same."""

    @property
    def declared(self) -> Mapping[str, LoraConfig]:
        """The adapters of the table, by name."""
        return {**({DEFAULT_ADAPTER: self.lora} if self.lora else {}), **(self.adapters or {})}


MOST_COMPLETIONS: Final = 65_536
"""Most completions of a prompt in a call. All of them are in memory at once."""


class Sampling(Config):
    """How completions are sampled."""

    beside: ClassVar[bool] = False
    """True if the call is not part of training, as with `BesideSampling`."""
    joins: ClassVar[bool] = False
    """True if the call may be decoded together with others of the same sampling, as with `JoinedSampling`."""
    n: int = Field(default=1, gt=0, le=MOST_COMPLETIONS)
    """Completions for each prompt."""
    max_tokens: int = Field(default=16, gt=0, le=2**24)
    """New tokens of a completion at most. A row's `max_tokens` column overrides it."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. 0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the most probable tokens, whose probabilities sum to this. Log-probs are those of the whole
    distribution."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Sample only from this number of the most probable tokens. 0: from all. Log-probs are those of the whole
    distribution."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token, up to `max_tokens`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, special tokens by name among them. The completion's text is cut before them, but its
    tokens are kept."""
    stop_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tokens that end a completion, besides the model's own ends, and with `ignore_eos` too."""
    stop_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Ids of tokens that end a completion, like `stop_tokens`."""
    seed: int = 0
    """Seed for sampling."""


class GroupSampling(Sampling):
    """How completions are sampled for algorithms that compare completions of a prompt: at least two each."""

    n: int = Field(default=8, ge=2, le=MOST_COMPLETIONS)
    """Completions for each prompt."""


class JoinedSampling(Sampling):
    """How rows are sampled that arrive a few at a time. A sampler may decode the rows of several calls together."""

    joins: ClassVar[bool] = True


class PairSampling(Sampling):
    """How completions are sampled for algorithms that compare the best with the worst: at least two for each prompt."""

    n: int = Field(default=2, ge=2, le=MOST_COMPLETIONS)
    """Completions for each prompt."""
