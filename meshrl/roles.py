"""Roles: what an algorithm may ask of a policy, a reference, a sampler and a reward.

A role is the contract; a backend (`meshrl_torch`, ...) overrides its methods with plain types.
The standard columns of a batch are listed in `data.Batch`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from math import prod
from types import NoneType
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from meshrl.actor import Actor, endpoint
from meshrl.advantages import Gae
from meshrl.config import Config
from meshrl.data import Batch
from meshrl.errors import ConfigError
from meshrl.layout import FsdpConfig, MegatronConfig, Shape, VllmConfig
from meshrl.losses import Loss
from meshrl.metrics import Metrics
from meshrl.sharding import EVERY, Gather, Mean, Shard
from meshrl.weights import Weights


class RoleConfig(Config):
    """What every role's table has: who implements it and where it runs."""

    backend: str = "torch"
    mesh: str = "main"
    """Roles that name the same mesh share its ranks; a name of its own is a mesh of its own."""
    axes: Shape = Field(default={})
    """How this role sees its mesh's ranks, the last one fastest; nothing means the mesh's own axes."""


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


class ModelConfig(RoleConfig):
    """A role that holds a model."""

    model: str | NewModel
    """A Hugging Face folder, a .gguf file (`package:NAME/FILE`: inside an installed package), or a table."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat: bool = False
    """Wrap each prompt as one user message in the tokenizer's chat template."""
    seed: int = 0


class AlgorithmConfig(Config):
    """The base of an algorithm's configuration.

    A role that names no `model` has the policy's, but for a reward and a teacher.
    """

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """The table with the policy's model in each role that holds a model and names none.

        A sampler has its adapters too, where they are what it is given.
        """
        policy = table.get("policy")
        if not isinstance(policy, Mapping) or "model" not in policy:
            return table
        filled = dict(table)
        lora = policy.get("lora")
        adapters = {"lora": lora} if isinstance(lora, Mapping) and lora.get("sync") == "adapters" else {}
        for name, field in cls.model_fields.items():
            kinds = _with_the_policys_model(field.annotation)
            role = filled.get(name, {} if field.is_required() else None)
            if isinstance(role, Mapping) and kinds:
                samples = any(issubclass(kind, SamplerConfig) for kind in kinds)
                filled[name] = {"model": policy["model"], **(adapters if samples else {}), **role}
        return filled


def _with_the_policys_model(annotation: object) -> Sequence[type[ModelConfig]]:
    """The tables that a role may have, where each of them has the policy's model unless it names one."""
    forms = [form for form in get_args(annotation) or (annotation,) if form is not NoneType]
    kinds = [form for form in forms if isinstance(form, type) and issubclass(form, ModelConfig)]
    others = any(issubclass(kind, RewardModelConfig | TeacherConfig) for kind in kinds)
    return kinds if len(kinds) == len(forms) and not others else []


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

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """The most tokens in one forward and backward pass; a longer row has a pass of its own."""
    activation_checkpointing: bool = False
    lora: LoraConfig | None = None
    """Train adapters; nothing means all parameters."""
    delta_sync: bool = False
    """Send what changed alone to samplers of other machines, without loss; it keeps a copy of the last weights."""
    fsdp: FsdpConfig = FsdpConfig()
    megatron: MegatronConfig = MegatronConfig()


class CriticConfig(ModelConfig):
    """A model with a value head that is trained."""

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """As a policy's."""
    fsdp: FsdpConfig = FsdpConfig()
    megatron: MegatronConfig = MegatronConfig()


class ReferenceConfig(ModelConfig):
    """A frozen model."""

    micro_batch_tokens: int = Field(default=16384, gt=0)
    fsdp: FsdpConfig = FsdpConfig()
    megatron: MegatronConfig = MegatronConfig()


class TeacherConfig(ReferenceConfig):
    """A frozen model that a policy learns from: it names a model of its own, with the policy's tokens."""


class RewardModelConfig(ModelConfig):
    """A frozen model that judges. With `chat`, prompt and completion are a user's and an assistant's message."""

    micro_batch_tokens: int = Field(default=16384, gt=0)
    """As a policy's."""
    fsdp: FsdpConfig = FsdpConfig()

    @field_validator("backend")
    @classmethod
    def _holds_a_model(cls, backend: str) -> str:
        if backend == "function":
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


class SamplerConfig(ModelConfig):
    """A model that generates."""

    slots: int = Field(default=512, gt=0)
    """Sequences decoded at once on a rank; a finished one gives its slot to the next."""
    lora: LoraConfig | None = None
    """The policy's, where its `sync` is "adapters"; filled in by an algorithm's configuration."""
    vllm: VllmConfig = VllmConfig()


class Sampling(Config):
    """How completions are drawn."""

    n: int = Field(default=1, gt=0)
    """Completions a prompt."""
    max_tokens: int = Field(default=16, gt=0)
    """The most new tokens; a row's own `max_tokens` column goes before it."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary."""
    ignore_eos: bool = False
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion; the completion text is cut before them, the tokens are kept."""
    seed: int = 0


class GroupSampling(Sampling):
    """How the completions of an algorithm are drawn that compares those of one prompt: at least two."""

    n: int = Field(default=8, ge=2)


class Stateful(Actor, ABC):
    """What a run's checkpoints keep: an actor that changes while the run goes on."""

    @endpoint
    @abstractmethod
    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write all that is needed to go on from here into a folder of this actor's own, made where it is not there.

        Each rank is given the same folder and writes what the role decides. Who calls sees to it that what is half
        written is never read. With `wait = False` it returns when the state is copied: `written` waits for the rest.
        """

    @endpoint
    async def written(self) -> None:
        """Wait until the last checkpoint is written. Raises what went wrong there."""

    @endpoint
    @abstractmethod
    async def restore(self, folder: str) -> None:
        """Take what `checkpoint` wrote there: each call gives, to the bit, what it would have given then.

        Of the configuration only what is no part of the state counts, such as the learning rate. An error, and
        nothing changed, where the folder is of another role or model.
        """


class Policy(Stateful, ABC):
    """A language model that is trained."""

    @endpoint
    @abstractmethod
    async def encode(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `tokens` and `loss_mask` from the texts `prompt` and `completion` (which ends with EOS).

        Rows with `messages`, lists of `{"role": ..., "content": ...}`, are dialogues in the model's own chat template,
        of which the assistant's turns are learned: all, or the last where the row's `learn` is "last".
        """

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """One optimizer step on the whole batch. The loss is normalised over the global batch."""

    @endpoint
    @abstractmethod
    async def logprobs(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `logprobs`, ragged float32: this model's log-probability of each token."""

    @endpoint
    @abstractmethod
    async def weights(self) -> Gather[Weights, EVERY]:
        """The current weights, of which each rank has made a part; their version is the number of updates so far."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer), whole or not at all."""


class Reference(Actor, ABC):
    """A frozen language model."""

    @endpoint
    @abstractmethod
    async def logprobs(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `reference_logprobs`, ragged float32."""

    @endpoint
    @abstractmethod
    async def load(self, weights: Weights) -> None:
        """Take a policy's whole weights, whatever backend and layout made them: it is frozen anew, as they are.

            await reference.load(await policy.weights())

        ModelError, and nothing taken, where they are of another model or dtype, or did not arrive as they were sent.
        Checkpoints keep nothing of a reference: a run that goes on loads them again.
        """


class Critic(Stateful, ABC):
    """A model that predicts the return from each token."""

    @endpoint
    @abstractmethod
    async def advantages(self, batch: Shard[Batch], gae: Gae) -> Gather[Batch]:
        """Add `values`, `advantages` and `returns`, ragged float32, from `rewards` and this model's values.

        Entry t of `values` is of the state that token t was drawn from; `advantages.gae` defines the others, and
        `critic.with_advantages` adds them. With `gae.kl` above 0 also from `logprobs` and `reference_logprobs`. Zero
        where `loss_mask` is False.
        """

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """One optimizer step on the whole batch: the loss is given the values where a policy's has log-probs."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write the model and its value head, whole or not at all."""


class Sampler(Actor, ABC):
    """A language model that generates."""

    @endpoint
    @abstractmethod
    def generate(self, prompts: Shard[Batch], sampling: Sampling) -> AsyncIterator[Gather[Batch]]:
        """Finished rollouts, some rows at a time, as they finish.

        Needs `prompt` (text). Each row gives `sampling.n` rows with all of its columns and `tokens`, `loss_mask`,
        `sampler_logprobs`, `versions`, `oldest_version` (int32, of the completion's tokens), `completion`,
        `temperature`, `truncated` and `aborted`. Rows that have `tokens`, `loss_mask`, `sampler_logprobs` and
        `versions` already, as aborted ones do, go on after them: `max_tokens` counts the whole completion, and one that
        has ended is yielded as it is.

        Such rows may have `observation`, text or None, whose tokens come first and are no part of the completion, which
        begins after them where `loss_mask` is False throughout. One with no room for it and a token more is yielded as
        it is, `truncated`; others draw as many as there is room for.
        """

    @endpoint
    @abstractmethod
    async def load(self, weights: Weights) -> Gather[Batch]:
        """Take new weights between two decode steps; tokens from then on carry their version.

        Returns where that was, int64 columns: `rank`, `load` (how many loads and aborts came to the rank before),
        `call` (the number of a call of `generate` on the rank) and `steps` (that it had made): a row for each call that
        was decoding, and one, with -1 steps, for the call that was the next to begin. Before them stand the rows of the
        aborts since the last load.

        Where the weights have a probe, a sampler that holds a model adds `difference`, float64: how far its log-probs
        are, on average, from the policy's; one that knows it adds `pause`, float64: the seconds in which it drew
        nothing. ModelError where they are too far, or a tensor is not as it was sent: then
        no token is drawn from what did arrive.
        """

    @endpoint
    @abstractmethod
    async def replay(self, record: Batch) -> None:
        """Let loads and aborts come where they came in an earlier run: `record` is what its loads returned, in order.

        Needs the same calls, at whatever moments: one of `generate` waits at the place of a load, and a load for the
        calls to be there. To be called before any other; after the last load the run is free. DataError, of the load,
        where the record does not fit.
        """

    @endpoint
    @abstractmethod
    async def abort(self) -> None:
        """End the running calls of `generate`: they yield what they have not finished, `aborted`, and no more.

        Such a row has the tokens so far, and `truncated` is False; one that had not begun has its prompt's tokens, and
        as its `oldest_version` that of the call's last step.
        """


class Reward(Actor, ABC):
    """What judges a completion."""

    @endpoint
    @abstractmethod
    async def score(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `rewards`, float32, and `reward_error`, the text of what the judge raised, or None."""
