"""Find and load algorithm scripts and their configurations, shipped ones included."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar, cast, get_type_hints

from pydantic import create_model

from meshrl.config import Config, PathIn, Table, as_list, load_toml, mistakes_in, validate
from meshrl.errors import ConfigError, did_you_mean
from meshrl.user_code import import_file

R = TypeVar("R", bound=Config)
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
class Job(Generic[R]):
    """A configuration file, read and found right: what to run, and with what."""

    source: Path
    script: Script
    run: R
    config: Config
    resolved: Table
    """The whole file with the defaults and overrides in place, and its paths absolute."""


class _Head(Config):
    """What has to be read of a file to know its schema."""

    algorithm: Annotated[str, PathIn(r"(.+\.py)")]


def shipped(kind: str) -> Path:
    """The folder `algorithms` or `configs` that comes with meshrl: in an installed wheel, or beside the sources."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind


def shipped_configs() -> dict[str, Path]:
    """Name (`grpo/quickstart`) and file of each shipped configuration, sorted by name."""
    folder = shipped("configs")
    named = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.glob("*/*.toml")}
    return dict(sorted(named.items()))


def about(path: Path) -> str:
    """Return the description of a configuration: its first comment line."""
    first = path.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find_config(name: str) -> Path:
    """Return the configuration file with this path or shipped name. ConfigError if there is none."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped_configs()
    if name in known:
        return known[name]
    if path.suffix == ".toml":
        load_toml(path)  # raises, naming the file that was probably meant
    if meant := [str(each) for each in sorted(path.glob("*.toml"))] or [each for each in known if _of(each) == name]:
        what = "is a folder" if path.is_dir() else "is an algorithm"
        raise ConfigError(f"{name}: {what}, not a configuration; did you mean {' or '.join(meant)}?")
    hint = did_you_mean(name, known, "{}") or f"the shipped ones are {', '.join(known)}"
    raise ConfigError(f"{name}: no such file or shipped configuration; {hint}")


def _of(config: str) -> str:
    """The algorithm of a shipped configuration: `grpo` of `grpo/quickstart`."""
    return config.partition("/")[0]


def root_of(source: Path) -> Path:
    """Where the paths of a configuration start: its folder. A shipped one has none of its own: where one stands."""
    return Path() if source.resolve().is_relative_to(shipped("configs").resolve()) else source.parent


def shipped_scripts() -> dict[str, Path]:
    """Name and file of each shipped algorithm, sorted."""
    return {path.stem: path for path in sorted(shipped("algorithms").glob("*.py"))}


def find_script(algorithm: str, source: Path | None = None) -> Path:
    """The shipped script of this name; with `source`, the file that names it, also a .py file."""
    if source is not None and algorithm.endswith(".py"):
        path = Path(algorithm)
        if not path.is_file():
            raise ConfigError(f"{source}: algorithm = {path.name!r}: there is no file {path}")
        return path
    known = shipped_scripts()
    if algorithm not in known:
        hint = did_you_mean(_of(algorithm), known) or f"the shipped ones are {', '.join(known)}"
        where, own = (f"{source}: ", " (a script of your own ends in .py)") if source else ("", "")
        raise ConfigError(f"{where}no algorithm {algorithm!r} is shipped; {hint}{own}")
    return known[algorithm]


def is_shipped(script: Script) -> bool:
    """Whether a script comes with meshrl, and is not the user's."""
    return script.path.resolve().is_relative_to(shipped("algorithms").resolve())


def load_script(path: Path) -> Script:
    """Run the file and take the async function of its own name, and the Config class that it asks for."""
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


def load_job(source: Path, overrides: Sequence[str], run: type[R]) -> Job[R]:
    """Read a configuration file: load its script, validate the `[run]` table as `run` and all else as the script's.

    Its paths start at `root_of(source)`, those of the overrides where one stands. Raises one ConfigError with all
    mistakes of the file.
    """
    return make_job(source, load_toml(source, overrides), run, root_of(source), overrides)


def make_job(source: Path, table: Table, run: type[R], folder: Path, overrides: Sequence[str] = ()) -> Job[R]:
    """A job of the tables of a configuration, whose paths start at `folder`.

    `source`: what errors say is wrong; `overrides`: those in the tables.
    """
    if not isinstance(table.get("algorithm"), str):
        raise ConfigError(as_list(_without_algorithm(source, table, run, folder, overrides)))
    named = validate(_Head, {"algorithm": table["algorithm"]}, source, overrides, folder).algorithm
    script = load_script(find_script(named, source))
    # One schema for the whole file, so that its mistakes come together and a key's nearest is sought everywhere.
    whole = _whole(script, run)
    read = validate(whole, {**table, "algorithm": named}, source, overrides, folder)
    values = {name: getattr(read, name) for name in script.schema.model_fields}
    return Job(
        source=source,
        script=script,
        run=cast("R", vars(read)["run"]),
        config=script.schema.model_validate(values),
        resolved=_placed({"algorithm": named, **read.model_dump(mode="json")}),
    )


def _placed(resolved: Table) -> Table:
    """With the folder of runs absolute: where one stands, whichever file the configuration is of."""
    run = resolved.get("run")
    if isinstance(run, dict) and isinstance(folder := run.get("folder"), str):
        return {**resolved, "run": {**run, "folder": str(Path(folder).absolute())}}
    return resolved


def _whole(script: Script, run: type[Config]) -> type[Config]:
    return create_model("File", __base__=script.schema, algorithm=(str, ...), run=(run, run()))


def _without_algorithm(
    source: Path, table: Table, run: type[Config], folder: Path, overrides: Sequence[str]
) -> list[str]:
    """The mistakes of a file that names no algorithm: it is judged as one of the shipped that fits it best.

    That nothing is left out of that one is not said: another may be meant.
    """
    scripts = shipped_scripts()
    missing = f'{source}: algorithm is missing: write algorithm = "NAME" (of {", ".join(scripts)}) or "FILE.py"'
    own = table.get("algorithm")
    if isinstance(own, dict):  # of another project, whose keys have answers of their own
        table = {**table, **{f"algorithm.{key}": value for key, value in own.items()}}
    judged = [
        mistakes_in(_whole(load_script(path), run), {**table, "algorithm": name}, source, overrides, folder)
        for name, path in scripts.items()
    ]
    wrong = [[each for each in mistakes if not each.endswith(": is missing")] for mistakes in judged]
    return [missing, *(each.replace(", which this algorithm does not have", "") for each in min(wrong, key=len))]
