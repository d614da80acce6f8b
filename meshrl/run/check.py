"""What can be found wrong with a configuration before any model loads."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from meshrl.config import Config, Keys, dotted
from meshrl.environments import EnvironmentConfig, load_environment
from meshrl.errors import BackendError, ConfigError, MeshrlError, ModelError, did_you_mean, shortened
from meshrl.hub import Repository, pinned
from meshrl.rewards import RewardConfig, load_function, try_reward
from meshrl.roles import (
    ModelConfig,
    Models,
    NewModel,
    PolicyConfig,
    ReferenceConfig,
    RoleConfig,
    SamplerConfig,
    Sampling,
    TeacherConfig,
    backends,
    check_axes,
    check_teacher,
    chosen_options,
    class_for,
    models_of,
    place_of,
)
from meshrl.run.algorithm_config import AlgorithmConfig
from meshrl.run.config import RunConfig
from meshrl.run.new import writer_of
from meshrl.tasks import TaskConfig, first_row
from meshrl.trackers import make_tracker
from meshrl.user_code import where_raised

_PATIENCE: Final = 10.0
"""Seconds for a reward to judge a row."""
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")


def find_mistakes(config: Config, run: RunConfig | None = None) -> list[str]:
    """Every mistake in the tables of a configuration that is valid in itself, each with its key.

    A task's source must exist and its first row fit the templates, a reward function must import and not raise on that
    row, a backend be installed and have the role, a model's folder or file be there, or a model of its name on the hub,
    with a template where it chats and room for `sampling.max_tokens`, a teacher have the policy's tokens. Each mesh of
    `run` must be named by a role, and a role's axes fit its own; one that is not there has one rank. Its trackers must
    be installed, and ready to take a run.
    """
    run = run or RunConfig()
    meshes = {name: mesh.ranks for name, mesh in run.meshes.items()}
    mistakes: list[str] = []
    policy = getattr(config, "policy", None)
    weights = [getattr(table, key) for _, table in _tables(config) for key in type(table).model_fields if key == "kl"]
    compares = any(weights) or not weights
    policy = policy if isinstance(policy, PolicyConfig) else None
    sampling = getattr(config, "sampling", None)
    sampling = sampling if isinstance(sampling, Sampling) else None
    for path, table in _tables(config):
        for check in _checks(table, policy, meshes, sampling, compares=compares):
            try:
                check()
            except MeshrlError as error:
                mistakes.append(f"{dotted(path)}: {error}")
    if not mistakes:  # a reward is called with what is right so far
        mistakes += find_reward_mistakes(config)
    if isinstance(config, AlgorithmConfig) and config.evaluation:
        mistakes += _mistakes_of_evaluation(config, wait=config.evaluation.wait)
    named = {table.mesh for _, table in _tables(config) if isinstance(table, RoleConfig)}
    for mesh in meshes:
        if mesh not in named:
            hint = did_you_mean(mesh, named) or f"they name {', '.join(sorted(named)) or 'none'}"
            mistakes.append(f"run.meshes.{mesh}: no role has `mesh = {mesh!r}`; {hint}")
    for name in run.trackers:
        try:
            make_tracker(name)
        except ConfigError as error:
            mistakes.append(str(error))
    return mistakes


def find_doubts(config: Config) -> list[str]:
    """What an algorithm's configuration may say and seldom means, each with its key.

    It is `top_p` or `top_k` under a loss that reads `sampler_logprobs`.
    """
    sampling, loss = getattr(config, "sampling", None), getattr(config, "loss", None)
    if not isinstance(sampling, Sampling) or "sampler_logprobs" not in getattr(loss, "columns", ()):
        return []
    restricts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0}
    return [
        f"sampling.{key} = {getattr(sampling, key):g} with {type(loss).__name__}: rows are drawn from part of the "
        "distribution, and the log-probs and ratios that the loss reads are of the whole: the loss does not know of "
        f"the difference; sampling.{key} = {Sampling.model_fields[key].default:g} leaves none (docs/overlap.md)"
        for key, there in restricts.items()
        if there
    ]


def find_reward_mistakes(config: Config) -> list[str]:
    """A reward function that raises on the task's first row, whether its answer or nothing is the completion.

    One that takes longer than some seconds is not waited for.
    """
    task, reward = getattr(config, "task", None), getattr(config, "reward", None)
    if not isinstance(task, TaskConfig) or not isinstance(reward, RewardConfig) or _models(reward) != "none":
        return []
    prompt, answer, row = first_row(task)
    mistakes: list[str] = []
    for name, function in reward.parts.items():
        errors = try_reward(function, prompt, ("", answer), row | {"answer": answer}, _PATIENCE)
        if errors and all(errors):
            key = f"reward.functions.{name}" if name else "reward.function"
            told = ", and ".join(dict.fromkeys(where_raised(error) for error in errors if error))
            mistakes.append(
                f"{key}: it raised on the task's first row, with its answer {shortened(answer)} as the completion and "
                f"with none: {told}"
            )
    return mistakes


def check_chat(config: ModelConfig) -> None:
    """ModelError where prompts are to be wrapped in a template that the model's folder has not."""
    folder = Path(str(config.model))
    described = folder / "tokenizer_config.json"
    if not config.chat or not described.is_file():
        return
    has = _json(described).get("chat_template") or any((folder / name).is_file() for name in _TEMPLATES)
    if not has:
        raise ModelError(
            f"chat = true, but {folder} has no chat template: use an instruction-tuned model, or chat = false"
        )


def check_room(config: ModelConfig, sampling: Sampling) -> None:
    """ConfigError where completions may be longer than what the model takes."""
    longest = _longest(config.model)
    if longest is not None and sampling.max_tokens >= longest:
        raise ConfigError(
            f"sampling.max_tokens = {sampling.max_tokens}: the model takes at most {longest} tokens, prompt and "
            "completion together: lower it, or take a model made for longer texts"
        )


def _longest(model: str | NewModel) -> int | None:
    """The longest sequence that a model takes; None where its folder does not say."""
    if isinstance(model, NewModel):
        return model.max_tokens
    file = Path(model) / "config.json"
    shape = _json(file) if file.is_file() else {}
    inner = shape.get("text_config")
    found = (inner if isinstance(inner, dict) else shape).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _json(file: Path) -> Mapping[str, object]:
    """A table in a file; an empty one where it is damaged, which is told when the model loads."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return {}


def check_model(model: str) -> None:
    """ModelError where no model is at this path, in a folder or a .gguf file, and none of this name on the hub."""
    path = Path(model)
    if not path.exists() and Repository.of(model):
        pinned(model)
        return
    if model.startswith("package:"):
        package, _, inside = model.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pip_name = package.replace("_", "-")
            raise ModelError(f"model {model!r}: the package {package!r} is not installed: pip install {pip_name}")
        path = Path(spec.origin).parent / inside
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {model!r}: there is no file {path.resolve()}")
    elif not path.is_dir():
        writer = writer_of(path)
        hint = f"; `meshrl run {writer}` writes it" if writer else ""
        raise ModelError(f"model {model!r}: there is no folder {path.resolve()}{hint}")
    elif not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ModelError(f"model {model!r}: {path.resolve()} holds no config.json, so it is no model's folder")


def _mistakes_of_evaluation(config: Config, *, wait: bool) -> Iterator[str]:
    samplers = [(path, table) for path, table in _tables(config) if isinstance(table, SamplerConfig)]
    if not samplers:
        yield "evaluation: the algorithm has no sampler, whose completions it would judge: leave it out"
    for path, table in samplers:
        if not wait and (key := chosen_options(table).lends_memory):
            yield (
                f"evaluation: {dotted((*path, table.backend, key))} gives the sampler's memory to what trains, which "
                "would train while it is evaluated: set evaluation.wait = true"
            )


def _tables(config: Config, above: Keys = ()) -> Iterator[tuple[Keys, Config]]:
    yield above, config
    for name in type(config).model_fields:
        value: object = getattr(config, name)
        if isinstance(value, Config):
            yield from _tables(value, (*above, name))


def _checks(
    table: Config, policy: PolicyConfig | None, meshes: Mapping[str, int], sampling: Sampling | None, *, compares: bool
) -> Iterator[Callable[[], object]]:
    """`compares`: whether a reference is read, for it is not where each weight of a KL penalty is 0."""
    is_read = compares or type(table) is not ReferenceConfig
    # A role with the policy's model is told there, where that is read.
    is_told = policy and table is not policy and (_models(policy) != "ignored" or not is_read)
    shared = policy.model if policy and is_told else None
    if isinstance(table, TaskConfig):
        yield lambda: first_row(table)
    if isinstance(table, RoleConfig):
        yield lambda: _check_backend(table, is_read=is_read)
        yield lambda: check_axes(table, meshes.get(table.mesh, 1))
    if isinstance(table, TeacherConfig) and policy:
        yield lambda: check_teacher(policy, table)
    if isinstance(table, RewardConfig) and _models(table) == "none":
        for function in table.parts.values():
            yield partial(load_function, function)
    if isinstance(table, EnvironmentConfig) and _models(table) == "none":
        yield lambda: load_environment(table)
    if isinstance(table, ModelConfig) and _models(table) != "ignored":
        model = table.model
        if isinstance(model, str) and model != shared:
            yield lambda: check_model(model)
        yield lambda: check_chat(table)
        if isinstance(table, SamplerConfig) and sampling:
            yield lambda: check_room(table, sampling)


def _models(table: RoleConfig) -> Models:
    return models_of(table.backend) if table.backend in backends() else "perhaps"


def _check_backend(config: RoleConfig, *, is_read: bool) -> None:
    """BackendError where there is none with the role, and of one that is read, where its packages are missing."""
    if config.role and is_read:
        class_for(config.role, config.backend)
    elif config.role:
        place_of(config.role, config.backend)
    elif config.backend not in backends():
        raise BackendError(f"no backend {config.backend!r} is installed: there are {', '.join(sorted(backends()))}")
