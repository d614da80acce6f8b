"""The configuration keys that all algorithms share."""

from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Final, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshrl.config import Config
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
from meshrl.tasks import RewardConfig, TaskConfig


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
    """Evaluate held-out prompts during the run. False, or no table: no evaluation."""

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
            raise ValueError(f"{told} in a step, and a step has at most {_MOST_ROWS:,}: lower them")
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

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """Return the table with the policy's model and the run's seed in each role with a model that sets none.

        A sampler also gets the policy's adapters if `lora.sync` is "adapters".
        """
        filled = dict(table)
        if filled.get("evaluation") is False:  # the only way for a command line to remove a file's table
            del filled["evaluation"]
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
