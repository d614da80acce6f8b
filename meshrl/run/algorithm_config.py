"""What the configurations of all algorithms have in common."""

from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Final, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshrl.config import Config
from meshrl.rewards import RewardConfig
from meshrl.roles import (
    MOST_COMPLETIONS,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    SamplerConfig,
    TeacherConfig,
)
from meshrl.tasks import TaskConfig


class EvaluationConfig(Config):
    """An algorithm's `[evaluation]`: held-out prompts, judged beside its steps."""

    every: int = Field(ge=1)
    """Steps: it begins before the first, after so many, and so on."""
    n: int = Field(default=4, ge=1, le=MOST_COMPLETIONS)
    """Completions a prompt, for pass@k; one greedy completion more is drawn."""
    rows: int | None = Field(default=None, ge=1)
    """The first so many prompts; nothing means all."""
    at_least: float = 1.0
    """The reward from which on a completion is right."""
    temperature: float | None = Field(default=None, gt=0)
    """Nothing means the run's."""
    seed: int = 0
    """Of what is drawn."""
    wait: bool = False
    """Let no step go on meanwhile: then all tokens are of one version."""


_LEAST: Final = {"steps": 0, "prompts": 1, "rows": 1, "epochs": 1, "minibatches": 1, "ahead": 0, "kl": 0}
"""Keys that mean the same in every algorithm, and the least that each may be."""
_OF_THE_POLICYS_MODEL: Final = ("dtype", "chat", "chat_template_kwargs")
"""What goes with the policy's model to each role that has it."""
_OF_A_READER: Final = ("backend", "model", "chat", "chat_template_kwargs")
"""What a task has of the policy, or of the first role with a model, to count tokens as it does."""
_MOST_ROWS: Final = 2**22
"""Of one step, all of which are in memory at once."""


class AlgorithmConfig(Config):
    """The base of an algorithm's configuration.

    A role that names no `model` has the policy's, its dtype and its chat template, but for a reward and a teacher.
    Refused are values without sense of the keys `steps`, `prompts`, `rows`, `epochs`, `minibatches`, `ahead` and `kl`,
    where a script has them, and a learning rate that is 0 before the last of `steps * epochs * minibatches` updates;
    and steps of more rows than a machine holds.
    """

    evaluation: EvaluationConfig | None = None
    """Judge held-out prompts beside the steps; nothing, or false, means not to."""

    @field_validator("*")
    @classmethod
    def _enough(cls, value: object, info: ValidationInfo) -> object:
        least = _LEAST.get(info.field_name or "")
        if least is not None and isinstance(value, int | float) and value < least:
            raise ValueError(f"must be greater than or equal to {least}")
        return value

    @model_validator(mode="after")
    def _rows_fit_in_memory(self) -> Self:
        prompts, n = (
            getattr(self, "prompts", getattr(self, "rows", 1)),
            getattr(getattr(self, "sampling", None), "n", 1),
        )
        if isinstance(prompts, int) and isinstance(n, int) and prompts * n > _MOST_ROWS:
            told = (
                f"{prompts:,} prompts with sampling.n = {n:,} are {prompts * n:,} rows"
                if n > 1
                else f"{prompts:,} rows"
            )
            raise ValueError(f"{told} a step, and a step has at most {_MOST_ROWS:,}: lower them")
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
                    f"{name}.optimizer.total_steps = {optimizer.total_steps}: the learning rate is 0 from there on, "
                    f"and the run makes {updates} updates (steps = {steps}, epochs = {epochs}, minibatches = {parts}): "
                    f"set it to {updates}, or make fewer"
                )
        return self

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """The table with the policy's model, and the run's seed, in each role that holds a model and names none.

        A sampler has its adapters too, where they are what it is given.
        """
        filled = dict(table)
        if filled.get("evaluation") is False:  # the one way of a command line to take a file's table out
            del filled["evaluation"]
        run, policy, task = table.get("run"), table.get("policy"), table.get("task")
        if isinstance(task, Mapping) and "longest" in task and (counts := cls._first_model(table)):
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
        """The table of the policy, or of the first role that names a model where there is no policy."""
        roles = [table.get(name) for name in ("policy", *cls.model_fields)]
        return next((role for role in roles if isinstance(role, Mapping) and "model" in role), None)

    @classmethod
    def implied(cls, table: Mapping[str, object]) -> Collection[str]:
        """The roles with the policy's model, where that is missing."""
        policy, field = table.get("policy", {}), cls.model_fields.get("policy")
        if field is None or not field.is_required() or not isinstance(policy, Mapping) or "model" in policy:
            return ()
        roles = ((name, _with_the_policys_model(field.annotation)) for name, field in cls.model_fields.items())
        return [name for name, kinds in roles if kinds and name != "policy"]


class RolloutConfig(AlgorithmConfig):
    """The base of a configuration whose policy learns from its own completions, which a reward judges.

    An algorithm adds how they are drawn, `sampling`, and its `loss`; and it may give a key another default.
    """

    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Read where the algorithm compares with it: most do where the weight of a KL penalty is above 0."""
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


def _forms(annotation: object) -> tuple[list[object], list[type[ModelConfig]]]:
    """The tables that a role may have, and those of them that hold a model."""
    forms = [form for form in get_args(annotation) or (annotation,) if form is not NoneType]
    return forms, [form for form in forms if isinstance(form, type) and issubclass(form, ModelConfig)]


def _holds_a_model(annotation: object, role: Mapping[str, object]) -> bool:
    """Whether a role's table is of one that holds a model."""
    forms, kinds = _forms(annotation)
    return bool(kinds) and (len(kinds) == len(forms) or "model" in role)


def _with_the_policys_model(annotation: object) -> Sequence[type[ModelConfig]]:
    """The tables that a role may have, where each of them has the policy's model unless it names one."""
    forms, kinds = _forms(annotation)
    others = any(issubclass(kind, RewardModelConfig | RewardTrainingConfig | TeacherConfig) for kind in kinds)
    return kinds if len(kinds) == len(forms) and not others else []
