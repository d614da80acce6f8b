"""Find and load algorithm scripts and their configurations, and pin what they name on the hub."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, TypeVar, cast, get_type_hints

from pydantic import create_model

from meshrl.config import Config, PathIn, Table, as_list, load_toml, mistakes_in, validate
from meshrl.errors import ConfigError, did_you_mean
from meshrl.hub import Kind, Repository, pinned
from meshrl.roles import ModelConfig, PolicyConfig, ReferenceConfig, models_of
from meshrl.run.config import RunConfig, reads_reference
from meshrl.tasks import TaskConfig
from meshrl.user_code import import_file

C = TypeVar("C", bound=Config)
Function = Callable[[object, Config], Awaitable[None]]
"""An algorithm: `async def NAME(run: Run, config: ItsConfig) -> None` in NAME.py."""


@dataclass(frozen=True)
class Script:
    """An algorithm script, loaded."""

    path: Path
    function: Function
    schema: type[Config]
    """The class of its configuration."""


@dataclass(frozen=True)
class Job:
    """A validated configuration file: what to run, and with which settings."""

    source: Path
    script: Script
    run: RunConfig
    config: Config
    resolved: Table
    """The whole file with defaults and overrides applied, and with absolute paths."""


class _Algorithm(Config):
    """The key of a file that determines its schema."""

    algorithm: Annotated[str, PathIn(r"(.+\.py)")]


def shipped(kind: str) -> Path:
    """Return the shipped folder `algorithms` or `configs`, in an installed wheel or next to the sources."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind


def shipped_configs() -> dict[str, Path]:
    """Return name (`grpo/quickstart`) and file of each shipped configuration, sorted by name."""
    folder = shipped("configs")
    named = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.glob("*/*.toml")}
    return dict(sorted(named.items()))


def description_of(path: Path) -> str:
    """Return the description of a configuration: its first comment line."""
    first = path.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find_config(name: str) -> Path:
    """Return the configuration file with this path or shipped name. Raises ConfigError if there is none."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped_configs()
    if name in known:
        return known[name]
    if path.suffix == ".toml":
        load_toml(path)  # raises, and suggests the file that was probably meant
    if meant := [str(each) for each in sorted(path.glob("*.toml"))] or [
        each for each in known if each.startswith(f"{name}/")
    ]:
        what = "is a folder" if path.is_dir() else "is an algorithm"
        raise ConfigError(f"{name}: {what}, not a configuration; did you mean {' or '.join(meant)}?")
    hint = did_you_mean(name, known, "{}") or f"the shipped ones are {', '.join(known)}"
    raise ConfigError(f"{name}: no such file or shipped configuration; {hint}")


def root_of(source: Path) -> Path:
    """Return the folder that a configuration's paths are relative to: its own, or the current one if it is shipped."""
    return Path() if source.resolve().is_relative_to(shipped("configs").resolve()) else source.parent


def shipped_scripts() -> dict[str, Path]:
    """Return name and file of each shipped algorithm, sorted by name."""
    return {path.stem: path for path in sorted(shipped("algorithms").glob("*.py"))}


def find_script(algorithm: str, source: Path | None = None) -> Path:
    """Return the shipped script of this name. With `source`, `algorithm` may be a .py file relative to that file."""
    if source is not None and algorithm.endswith(".py"):
        path = Path(algorithm)
        if not path.is_file():
            raise ConfigError(f"{source}: algorithm = {path.name!r}: there is no file {path}")
        return path
    known = shipped_scripts()
    if algorithm not in known:
        hint = did_you_mean(algorithm.partition("/")[0], known) or f"the shipped ones are {', '.join(known)}"
        where, own = (f"{source}: ", " (a script of your own ends in .py)") if source else ("", "")
        raise ConfigError(f"{where}no algorithm {algorithm!r} is shipped; {hint}{own}")
    return known[algorithm]


def is_shipped(script: Script) -> bool:
    """True if a script is shipped with meshrl."""
    return _is_shipped(script.path)


def _is_shipped(path: Path) -> bool:
    return path.resolve().is_relative_to(shipped("algorithms").resolve())


def load_script(path: Path) -> Script:
    """Run the file, and return its async function of the same name and the Config class that this takes.

    A shipped one runs once in a process.
    """
    return _shipped_script(path) if _is_shipped(path) else _script(path)


@cache
def _shipped_script(path: Path) -> Script:
    return _script(path)


def _script(path: Path) -> Script:
    try:
        module = import_file(path)
    except ConfigError as error:
        raise ConfigError(f"algorithm {path}: {error}") from error.__cause__
    wanted = f"it needs `async def {path.stem}(run: Run, config: ItsConfig) -> None`"
    function: object = vars(module).get(path.stem)
    if not inspect.iscoroutinefunction(function):
        kind = "not an async function" if function else "not there"
        raise ConfigError(f"algorithm {path}: {path.stem!r} is {kind}; {wanted}")
    parameters = list(inspect.signature(function).parameters)
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"algorithm {path}: an annotation of {path.stem} cannot be resolved: {error}") from error
    schema: object = hints.get(parameters[1]) if len(parameters) == 2 else None
    if not (isinstance(schema, type) and issubclass(schema, Config)):
        signature = f"{path.stem}{inspect.signature(function)}"
        raise ConfigError(f"algorithm {path}: {signature} has no config parameter that is a Config; {wanted}")
    taken = sorted({"run", "algorithm"} & schema.model_fields.keys())
    if taken:
        raise ConfigError(
            f"algorithm {path}: {schema.__name__}.{taken[0]}: the key {taken[0]!r} is reserved by meshrl: rename it"
        )
    return Script(path, cast("Function", function), schema)


def load_job(source: Path, overrides: Sequence[str]) -> Job:
    """Read a configuration file: load its script, and validate the `[run]` table and the script's keys.

    Its paths start at `root_of(source)`, and those of overrides at the current folder. Raises one ConfigError with all
    mistakes of the file.
    """
    return make_job(source, load_toml(source, overrides), root_of(source), overrides)


def make_job(source: Path, table: Table, folder: Path, overrides: Sequence[str] = ()) -> Job:
    """Make a job of the tables of a configuration, whose paths start at `folder`.

    `source`: the name in error messages. `overrides`: the overrides that the tables contain. Raises one ConfigError
    with all mistakes.
    """
    if not isinstance(table.get("algorithm"), str):
        raise ConfigError(as_list(_without_algorithm(source, table, folder, overrides)))
    named = validate(_Algorithm, {"algorithm": table["algorithm"]}, source, overrides, folder).algorithm
    script = load_script(find_script(named, source))
    # One schema for the whole file reports all mistakes together, and searches all keys for the nearest.
    whole = validate(_file_schema(script.schema), {**table, "algorithm": named}, source, overrides, folder)
    values = {name: getattr(whole, name) for name in script.schema.model_fields}
    run = cast("RunConfig", vars(whole)["run"])
    resolved: Table = {"algorithm": named, **whole.model_dump(mode="json")}
    # The folder of runs starts at the current folder, whichever file contains it.
    resolved["run"] = {**cast("Table", resolved["run"]), "folder": str(Path(run.folder).absolute())}
    return Job(source, script, run, script.schema.model_validate(values), resolved)


@lru_cache(16)
def _file_schema(schema: type[Config]) -> type[Config]:
    return create_model("File", __base__=schema, algorithm=(str, ...), run=(RunConfig, RunConfig()))


def _without_algorithm(source: Path, table: Table, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the mistakes of a file that names no algorithm, judged by the shipped algorithm that fits it best.

    Missing keys of that algorithm are not reported, because another may be meant.
    """
    scripts = shipped_scripts()
    missing = f'{source}: algorithm is missing: write algorithm = "NAME" (of {", ".join(scripts)}) or "FILE.py"'
    own = table.get("algorithm")
    if isinstance(own, dict):  # of another project, whose keys have their own hints
        table = {**table, **{f"algorithm.{key}": value for key, value in own.items()}}
    judged = [
        mistakes_in(_file_schema(load_script(path).schema), {**table, "algorithm": name}, source, overrides, folder)
        for name, path in scripts.items()
    ]
    wrong = [[each for each in mistakes if not each.endswith(": is missing")] for mistakes in judged]
    return [missing, *(each.replace(", which this algorithm does not have", "") for each in min(wrong, key=len))]


def pin(job: Job) -> Job:
    """Replace each model and dataset of the hub by `ORG/NAME@COMMIT`. Raises ModelError or DataError like `pinned`."""
    policy: object = getattr(job.config, "policy", None)
    is_fake = isinstance(policy, PolicyConfig) and models_of(policy.backend) == "ignored"
    # A fork with another loss may read a reference that this run does not, but not of a fake policy.
    config = _pinned(job.config, cache(pinned), compares=not is_fake or reads_reference(job.config))
    if config is job.config:
        return job
    return replace(job, config=config, resolved=job.resolved | config.model_dump(mode="json"))


def _pinned(config: C, commit: Callable[[str, Kind], str], *, compares: bool) -> C:
    changed: dict[str, object] = {}
    for name in type(config).model_fields:
        value: object = getattr(config, name)
        if isinstance(value, Config) and (new := _pinned(value, commit, compares=compares)) is not value:
            changed[name] = new
    if isinstance(config, ModelConfig) and isinstance(model := config.model, str):
        is_read = models_of(config.backend) != "ignored" and not Path(model).exists()
        is_read = is_read and (compares or not isinstance(config, ReferenceConfig))
        if is_read and Repository.of(model):
            changed["model"] = commit(model, "model")
    if isinstance(config, TaskConfig) and config.source.startswith("hf:"):
        changed["source"] = f"hf:{commit(config.source.removeprefix('hf:'), 'dataset')}"
    return config.model_copy(update=changed) if changed else config
