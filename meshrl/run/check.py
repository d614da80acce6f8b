"""Find mistakes in a configuration before any model loads, and in what its roles and its task read."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, cast

from meshrl.agents import AgentConfig, load_agent, load_reward
from meshrl.config import Config, as_list, dotted
from meshrl.errors import (
    BackendError,
    ConfigError,
    MeshrlError,
    ModelError,
    did_you_mean,
    is_discarded,
    nearest,
    shortened,
)
from meshrl.hub import Repository, pinned, with_config
from meshrl.roles import (
    ModelConfig,
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
    function_of,
    import_path,
)
from meshrl.run.check_rows import find_pair_doubts, find_prompt_doubts, find_row_doubts, find_row_mistakes
from meshrl.run.config import AlgorithmConfig, RunConfig, reads_reference, table_of, tables_of, uses_model
from meshrl.run.folder import read_json
from meshrl.run.memory import doubts_of_memory, longest_of
from meshrl.run.scaffold import writer_of
from meshrl.run.trackers import make_tracker
from meshrl.tasks import (
    EnvironmentConfig,
    RewardConfig,
    TaskConfig,
    accepted,
    first_row,
    is_own,
    load_environment,
    load_function,
    try_reward,
)
from meshrl.user_code import where_raised

_PATIENCE: Final = 10.0
"""Seconds that a reward gets to score a row."""
_MAIN: Final[str] = RoleConfig.model_fields["mesh"].default
"""The mesh of roles that name none."""


class Findings(NamedTuple):
    """Mistakes and doubts about a configuration, each with its key."""

    mistakes: Sequence[str]
    doubts: Sequence[str]
    """Valid settings that are rarely intended."""
    notes: Sequence[str] = ()
    """How each role's model reads rows."""


def examine(config: Config, run: RunConfig | None = None, *, memory: bool = True) -> Findings:
    """Return the findings of `find_mistakes` and `find_doubts`, and doubts about the reward of the task's first answer.

    With `memory`, also doubts whether the roles of a mesh fit, if it has GPUs or sets the memory of a rank, and how
    roles read the rows of models in folders and on the hub. A model that a backend cannot read is a mistake.
    """
    run = run or RunConfig()
    mistakes = [*_mistakes_of_tables(config, run)]
    doubts: list[str] = []
    notes: list[str] = []
    task, prompts = table_of(config, "task", TaskConfig), getattr(config, "prompts", None)
    if task and not mistakes:  # rows and rewards are only tried with a correct configuration
        mistakes += [f"task: {mistake}" for mistake in find_row_mistakes(task, config)]
    if not mistakes:
        wrong, doubts = _try_reward(config)
        mistakes += wrong
        doubts += find_row_doubts(task, prompts) if task and isinstance(prompts, int) else []
        doubts += find_prompt_doubts(task) if task else []
        doubts += find_pair_doubts(task, config) if task and isinstance(config, AlgorithmConfig) else []
    if isinstance(config, AlgorithmConfig) and config.evaluation:
        mistakes += _mistakes_of_evaluation(config, pausing=config.evaluation.pause_training)
    mistakes += _mistakes_of_run(config, run)
    if memory and not mistakes:
        doubts += doubts_of_memory(config, run)
        wrong, notes = _try_models(config)
        mistakes += wrong
    return Findings(mistakes, [*find_doubts(config), *doubts], notes)


def find_mistakes(config: Config, run: RunConfig | None = None) -> list[str]:
    """Return every mistake in the tables of a configuration that is valid in itself, each with its key.

    The task's source must exist, and the rows that are read must fit the templates and the model. A reward function
    must import and not raise on the first row. A backend must be installed and have the role. A model must exist as a
    folder, a file or a name on the hub, with a chat template if it chats, and with room for `sampling.max_tokens`. A
    sampler must have the policy's dtype, and a teacher its tokens. Each mesh of `run` must be named by a role, and a
    role's axes must fit its mesh; a mesh without a table has one rank. Trackers must be installed and ready for a run.
    """
    return [*examine(config, run, memory=False).mistakes]


def _mistakes_of_tables(config: Config, run: RunConfig) -> Iterator[str]:
    meshes = {name: mesh.ranks for name, mesh in run.meshes.items()}
    compares = reads_reference(config)
    policy, sampling = table_of(config, "policy", PolicyConfig), table_of(config, "sampling", Sampling)
    converses = any(isinstance(table, AgentConfig) for _, table in tables_of(config))
    for path, table in tables_of(config):
        for check in _checks(table, policy, meshes, sampling, compares=compares, converses=converses):
            try:
                check()
            except MeshrlError as error:
                yield f"{dotted(path)}: {error}"


def _mistakes_of_run(config: Config, run: RunConfig) -> Iterator[str]:
    roles = {dotted((*path, "mesh")): table.mesh for path, table in tables_of(config) if isinstance(table, RoleConfig)}
    named = set(roles.values())
    for mesh in run.meshes:
        if mesh not in named:
            hint = did_you_mean(mesh, named) or f"they name {', '.join(sorted(named)) or 'none'}"
            near = nearest(mesh, named - run.meshes.keys() - {_MAIN})  # either of the two may be wrong
            if near:
                keys = ", ".join(f"{key} = {near!r}" for key, name in roles.items() if name == near)
                hint = f"{keys}: write the same name in both"
            yield f"run.meshes.{mesh}: no role has `mesh = {mesh!r}`; {hint}"
    for path, table in tables_of(config):
        if isinstance(table, RoleConfig) and table.mesh in run.meshes:
            try:
                run.meshes[table.mesh].check_takes(table)
            except ConfigError as error:
                yield f"{dotted(path)}: {error}"
    yield from _mistakes_of_sync(config, run)
    for name in run.trackers:
        try:
            make_tracker(name)
        except ConfigError as error:
            yield str(error)


def _mistakes_of_sync(config: Config, run: RunConfig) -> Iterator[str]:
    policy, sampler = table_of(config, "policy", PolicyConfig), table_of(config, "sampler", SamplerConfig)
    if policy and policy.weight_sync == "broadcast" and run.engine == "local":
        yield (
            'policy.weight_sync: "broadcast" sends weights between processes, but with run.engine = "local" ranks are '
            'threads: set run.engine = "processes", or remove weight_sync'
        )
    if policy and policy.weight_sync_dtype == "fp8" and sampler and chosen_options(sampler).quantized != "fp8":
        yield (
            f'policy.weight_sync_dtype: "fp8" sends matrices in FP8, but the sampler has them in {sampler.dtype}: set '
            'quantization = "fp8" in the table of a backend that has it (docs/weights.md), or remove weight_sync_dtype'
        )


def find_doubts(config: Config) -> list[str]:
    """Return valid settings of an algorithm's configuration that are rarely intended, each with its key.

    These are `top_p` or `top_k` with a loss that reads `sampler_logprobs`, `ahead` above 0 on one mesh, and completions
    that may never end.
    """
    doubts: list[str] = []
    sampling, loss = table_of(config, "sampling", Sampling), getattr(config, "loss", None)
    if sampling and "sampler_logprobs" in getattr(loss, "columns", ()):
        doubts += [
            f"sampling.{key} = {getattr(sampling, key):g} with {type(loss).__name__}: rows are sampled from a part of "
            "the distribution, but the loss reads log-probs and ratios of the whole distribution, and ignores the "
            f"difference: sampling.{key} = {Sampling.model_fields[key].default:g} avoids this (docs/overlap.md)"
            for key, is_set in {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0}.items()
            if is_set
        ]
    policy, sampler = table_of(config, "policy", PolicyConfig), table_of(config, "sampler", SamplerConfig)
    if sampling and sampler and uses_model(sampler) != "ignored":
        with suppress(MeshrlError):  # which are mistakes
            doubts += [f"sampler: {doubt}" for doubt in doubts_of_ends(sampler, sampling)]
    ahead = getattr(config, "ahead", 0)
    if ahead and policy and sampler and policy.mesh == sampler.mesh:
        # Training continues while a sampler waits for servers or programs.
        programs = any(isinstance(table, AgentConfig | EnvironmentConfig) for _, table in tables_of(config))
        doubt = (
            f"ahead = {ahead}: policy and sampler share the mesh {policy.mesh!r}, so rollout and training take turns: "
            'rows get older and steps no shorter. Give the sampler a mesh (sampler.mesh = "rollout"), or set ahead = 0 '
            "(docs/overlap.md)"
        )
        doubts += [] if programs or chosen_options(sampler).samples_elsewhere else [doubt]
    return doubts


def _try_reward(config: Config) -> tuple[list[str], list[str]]:
    """Call the reward functions with the answer of the task's first row, and with an empty completion.

    A function that raises on both is a mistake. A user's function that raises on one, or gives the correct answer no
    reward, is a doubt. So is one that takes longer than 10 seconds, which is not awaited.
    """
    task, reward = table_of(config, "task", TaskConfig), table_of(config, "reward", RewardConfig)
    mistakes: list[str] = []
    doubts: list[str] = []
    if task is None or reward is None or uses_model(reward) != "none":
        return mistakes, doubts
    prompt, answer, row = first_row(task)
    completions = ("", next(iter(accepted(answer)), ""))
    for name, function in reward.called.items():
        judged = row | {"answer": answer}
        tried = try_reward(function, cast("str", prompt), completions, judged, _PATIENCE, reward.sandbox)
        errors = [error for _, error in tried if error and not is_discarded(error)]
        key = f"reward.functions.{name}" if name else "reward.function"
        if errors and len(errors) == len(tried):
            reasons = ", and ".join(dict.fromkeys(map(where_raised, errors)))
            mistakes.append(
                f"{key}: it raised on the task's first row, with its answer {shortened(answer)} as the completion and "
                f"with none: {reasons}"
            )
        elif not tried:
            doubts.append(
                f"{key} did not answer within {_PATIENCE:g} s for the task's first row, so it was not checked"
            )
        elif errors and is_own(function):
            what = f"its answer {shortened(answer)} as the completion" if tried[1][1] else "an empty completion"
            doubts.append(f"{key}: it gave the task's first row no reward, with {what}: {where_raised(errors[0])}")
        elif answer and is_own(function) and tried[1][1] is None and tried[1][0] <= 0:
            doubts.append(
                f"{key}: the task's own answer scores {tried[1][0]:g}: the first row's, {shortened(answer)}, as the "
                "completion. This is fine if completions should have another form"
            )
    return mistakes, doubts


def _try_models(config: Config) -> tuple[list[str], list[str]]:
    """Return models that their backends cannot read, and how each of the others reads rows."""
    mistakes: list[str] = []
    notes: dict[str, list[str]] = {}
    compares = reads_reference(config)
    for path, table in tables_of(config):
        if not isinstance(table, ModelConfig) or not isinstance(table.model, str) or uses_model(table) == "ignored":
            continue
        is_read = compares or type(table) is not ReferenceConfig
        if not is_read or not (reads := function_of(table.backend, "READS")):
            continue
        with _with_config(table.model) as folder:
            if folder is None:
                continue
            try:
                note = str(reads(table.model_copy(update={"model": str(folder)})))
                notes.setdefault(note, []).append(dotted(path))
            except (ConfigError, ModelError) as error:
                mistakes.append(f"{dotted(path)}: {str(error).replace(str(folder), table.model)}")
    return mistakes, [f"{', '.join(roles)}: rows are {note}" for note, roles in notes.items()]


def _with_config(model: str) -> AbstractContextManager[Path | None]:
    """Return a context with a folder that has a model's config.json, which a name on the hub is asked for."""
    path = Path(model)
    if not path.exists() and Repository.of(model):
        return with_config(model)
    return nullcontext(path if (path / "config.json").is_file() else None)


def _mistakes_of_evaluation(config: Config, *, pausing: bool) -> Iterator[str]:
    samplers = [(path, table) for path, table in tables_of(config) if isinstance(table, SamplerConfig)]
    if not samplers:
        yield "evaluation: the algorithm has no sampler to evaluate: remove this table"
    for path, table in samplers:
        if not pausing and (key := chosen_options(table).lends_memory):
            yield (
                f"evaluation: {dotted((*path, table.backend, key))} gives the sampler's memory to training, which "
                "would continue during an evaluation: set evaluation.pause_training = true"
            )


def _checks(
    table: Config,
    policy: PolicyConfig | None,
    meshes: Mapping[str, int],
    sampling: Sampling | None,
    *,
    compares: bool,
    converses: bool,
) -> Iterator[Callable[[], object]]:
    """`compares`: the reference is read, because the weight of a KL penalty is above 0.

    `converses`: agents talk to the sampler's model.
    """
    is_read = compares or type(table) is not ReferenceConfig
    # A mistake in a model that the policy has too is reported with the policy, if that is read.
    reads_policy = policy and (uses_model(policy) != "ignored" or not is_read)
    shared = policy.model if policy and reads_policy and table is not policy else None
    if isinstance(table, TaskConfig):
        yield partial(first_row, table)
    if isinstance(table, RoleConfig):
        yield partial(_check_backend, table, is_read=is_read)
        yield partial(check_axes, table, meshes.get(table.mesh, 1))
    if isinstance(table, TeacherConfig) and policy:
        yield partial(check_teacher, policy, table)
    if isinstance(table, RewardConfig) and uses_model(table) == "none":
        for function in table.called.values():
            yield partial(load_function, function)
    if isinstance(table, EnvironmentConfig) and uses_model(table) == "none":
        yield partial(load_environment, table)
    if isinstance(table, AgentConfig):
        yield partial(load_agent, table)
        yield partial(load_reward, table)
    if isinstance(table, ModelConfig) and uses_model(table) != "ignored":
        if isinstance(table.model, str) and table.model != shared:
            yield partial(check_model, table.model)
        yield from _checks_of_model(table, policy, sampling, converses=converses)


def _checks_of_model(
    table: ModelConfig, policy: PolicyConfig | None, sampling: Sampling | None, *, converses: bool
) -> Iterator[Callable[[], object]]:
    yield partial(check_chat, table, converses=converses and isinstance(table, SamplerConfig))
    if isinstance(table, SamplerConfig) and sampling:
        yield partial(check_room, table, sampling)
        yield partial(doubts_of_ends, table, sampling)
    if isinstance(table, SamplerConfig) and policy and uses_model(policy) != "ignored":
        yield partial(check_dtype, table, policy)
        yield partial(check_takes, table)


def _check_backend(config: RoleConfig, *, is_read: bool) -> None:
    """Raise BackendError if no backend has the role, or if the packages of a role that is read are missing."""
    if config.role and is_read:
        class_for(config.role, config.backend)
        if needs := function_of(config.backend, "NEEDS"):
            needs(config)
    elif config.role:
        import_path(config.role, config.backend)
    elif config.backend not in backends():
        raise BackendError(f"no backend {config.backend!r} is installed: there are {', '.join(sorted(backends()))}")


def check_chat(config: ModelConfig, *, converses: bool) -> None:
    """Raise ModelError if the model has no chat template but prompts are wrapped in one, or agents converse."""
    if not (config.chat or converses) or _has_template(config.model):
        return
    model = "a new model" if isinstance(config.model, NewModel) else config.model
    if converses:
        raise ModelError(
            f"agents need a chat template, and {model} has none: use an instruction-tuned model, or set "
            "model.chat_template of a new one"
        )
    raise ModelError(f"chat = true, but {model} has no chat template: use an instruction-tuned model, or chat = false")


def _has_template(model: str | NewModel) -> bool:
    """True if the model has a template, and also if it is not here to be looked at."""
    if isinstance(model, NewModel):
        return model.chat_template is not None
    described, template = Path(model) / "tokenizer_config.json", Path(model) / "chat_template.jinja"
    return not described.is_file() or bool(read_json(described).get("chat_template")) or template.is_file()


def check_dtype(config: SamplerConfig, policy: PolicyConfig) -> None:
    """Raise ConfigError if a sampler computes in another dtype than the weights that it receives."""
    if config.dtype != policy.dtype:
        raise ConfigError(
            f'dtype = "{config.dtype}", but the policy publishes {policy.dtype}, which a sampler loads unchanged: '
            f'remove sampler.dtype to use the policy\'s, or set policy.dtype = "{config.dtype}"'
        )


def check_takes(config: SamplerConfig) -> None:
    """Raise ConfigError if a sampler takes no weights, but a policy publishes some."""
    if key := chosen_options(config).keeps_weights:
        raise ConfigError(
            f"{config.backend}.{key} is not set, so this sampler keeps its weights, but the policy publishes new "
            f"ones: set sampler.{config.backend}.{key}, or sample without a policy"
        )


def check_room(config: ModelConfig, sampling: Sampling) -> None:
    """Raise ConfigError if completions may exceed the model's longest sequence."""
    longest = longest_of(config.model)
    if longest is not None and sampling.max_tokens >= longest:
        raise ConfigError(
            f"sampling.max_tokens = {sampling.max_tokens}: the model takes at most {longest} tokens, prompt and "
            "completion together: lower it, or choose a model for longer texts"
        )


def doubts_of_ends(config: SamplerConfig, sampling: Sampling) -> list[str]:
    """Say why completions may never end. ModelError if none can, and DataError for unknown `stop_tokens`."""
    find = function_of(config.backend, "ENDS") if config.backend in backends() else None
    doubt = cast("str | None", find(config, sampling)) if find else None
    return [doubt] if doubt else []


def check_model(model: str) -> None:
    """Raise ModelError for a path that is neither a model folder nor a .gguf file, and an unknown name on the hub."""
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
        raise ModelError(f"model {model!r}: {path.resolve()} has no config.json, so it is not the folder of a model")


def list_of_mistakes(source: Path, mistakes: Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Return the findings of `find_mistakes` in a configuration as one text.

    The same mistake of several keys, such as a model that roles share, is reported once with all keys. A mistake in the
    value of an override is attributed to the command line.
    """
    keys: dict[str, list[str]] = {}
    for mistake in mistakes:
        key, _, text = mistake.partition(": ")
        keys.setdefault(text, []).append(key)
    return as_list(
        [
            f"{'command line' if any(_sets_key(each, key, text) for each in overrides for key in of) else source}: "
            f"{', '.join(of)}: {text}"
            for text, of in keys.items()
        ]
    )


def _sets_key(override: str, key: str, text: str) -> bool:
    """True if a mistake at a key comes from an override of it or below it, or names the override itself."""
    given, value = (each.strip() for each in override.split("=", 1))
    bare = value.strip("\"'")
    if f"{given} = {value}" in text or f"{given} = {bare!r}" in text:
        return True
    at = re.search(rf"(?<!\w){re.escape(bare)}(?!\w)", text) if bare else None
    return at is not None and f"{given}.".startswith(f"{key}.")
