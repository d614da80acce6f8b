"""The reference of the configuration: every table and key, of the pydantic models that read it."""

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from meshrl.config import Config
from meshrl.roles import BackendOptions, backends
from meshrl.run import RunConfig
from meshrl.run.jobs import load_script, shipped_configs, shipped_scripts

CONFIGURATION, ALGORITHMS, BACKENDS = (f"reference/{name}.md" for name in ("configuration", "algorithms", "backends"))
_PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", object: "any value"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "length at least"}


def pages() -> dict[str, str]:
    """The text of each page, by its path in the site."""
    algorithms = {name: _configuration_of(name) for name in sorted(shipped_scripts())}
    tables = _tables(algorithms)
    options = {name: schemas for name in sorted(backends()) if (schemas := _options(name))}
    return {
        CONFIGURATION: _configuration(tables),
        ALGORITHMS: _algorithms(algorithms),
        BACKENDS: _backends(options),
    }


def _configuration(tables: Mapping[type[Config], list[str]]) -> str:
    head = """# Configuration

Look up any table or key of a configuration file here. A file is TOML: `algorithm` names the script. The other keys
at the top and the tables are those of [the algorithm](algorithms.md). `[run]` is the same for all. Each key can be set
on the command line too, as in `policy.optimizer.lr=1e-5`. An unknown key is an error that names the nearest one.
`meshrl check FILE` finds mistakes before a model loads.
"""
    places: dict[str, list[str]] = {}
    for table, paths in tables.items():
        for path in paths:
            if path.count(".") < 2:
                places.setdefault(path, []).append(f"[{table.__name__}](#{table.__name__.lower()})")
    head += "\n| In a file | What it may be |\n|---|---|\n"
    head += "".join(f"| `[{path}]` | {', '.join(places[path])} |\n" for path in sorted(places))
    return head + "".join(f"\n## {table.__name__}\n\n{_table(table, tables[table])}" for table in tables)


def _algorithms(algorithms: Mapping[str, type[Config]]) -> str:
    head = """# Keys of each algorithm

Look up which keys and tables an algorithm reads, and its defaults. `algorithm = "NAME"` chooses one. The tables that
a key links to are in [Configuration](configuration.md).
"""
    parts = [head]
    for name, config in algorithms.items():
        said = inspect.getdoc(inspect.getmodule(config)) or ""
        shipped = ", ".join(f"`{each}`" for each in shipped_configs() if each.startswith(f"{name}/"))
        parts.append(f"\n## {name}\n\n{said}\n\nShipped configurations: {shipped}\n\n{_keys(config)}")
    return "".join(parts)


def _backends(options: Mapping[str, Mapping[str, list[str]]]) -> str:
    head = """# Options of each backend

Look up what a backend lets you set. A role's table chooses its backend by `backend = "NAME"`; a table of that name in
it holds the backend's own options, as `[sampler.vllm]` does.
"""
    parts = [head]
    for backend, schemas in options.items():
        for place, roles in schemas.items():
            module, _, name = place.partition(":")
            schema = getattr(importlib.import_module(module), name)
            where = ", ".join(f"`{role}`" for role in roles)
            parts.append(f"\n## {backend}\n\nFor the roles {where}.\n\n{_said(schema)}\n\n{_keys(schema)}")
    return "".join(parts)


def _options(backend: str) -> dict[str, list[str]]:
    """Where each schema of a backend's options is, and the roles that have it."""
    found: dict[str, list[str]] = {}
    for role, place in getattr(importlib.import_module(backends()[backend]), "OPTIONS", {}).items():
        found.setdefault(place, []).append(role)
    return found


def _configuration_of(algorithm: str) -> type[Config]:
    return load_script(shipped_scripts()[algorithm]).schema


def _tables(algorithms: Mapping[str, type[Config]]) -> dict[type[Config], list[str]]:
    """Each table that a file can have below an algorithm's keys, and the keys that lead to it."""
    found: dict[type[Config], list[str]] = {}

    def add(table: type[Config], path: str) -> None:
        if path in found.setdefault(table, []):
            return
        found[table].append(path)
        for name, field in table.model_fields.items():
            for below, suffix in _configs_in(field.annotation):
                add(below, f"{path}.{name}{suffix}")

    add(RunConfig, "run")
    for config in algorithms.values():
        for name, field in config.model_fields.items():
            for table, suffix in _configs_in(field.annotation):
                add(table, f"{name}{suffix}")
    return found


def _configs_in(annotation: object) -> Iterator[tuple[type[Config], str]]:
    """The tables that a key may hold, with what stands after the key in their path."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation, ""
    suffix = ".NAME" if get_origin(annotation) is dict else ""
    for part in get_args(annotation):
        yield from ((table, suffix + below) for table, below in _configs_in(part))


def _table(table: type[Config], paths: list[str]) -> str:
    where = sorted(paths, key=lambda path: (path.count("."), len(path)))
    told = ", ".join(f"`[{path}]`" for path in where[:4]) + (" and others" if len(where) > 4 else "")
    return f"In a file: {told}\n\n{_said(table)}\n\n{_keys(table)}"


def _said(table: type[Config]) -> str:
    return inspect.getdoc(table) or ""


def _keys(table: type[Config]) -> str:
    """Each key of a table as a definition: its name, type and default, and below them what it means."""
    parts: list[str] = []
    for name, field in table.model_fields.items():
        place = f"{table.__name__}.{name}".lower()
        meaning = textwrap.indent(_meaning(table, name), "    ").lstrip()
        parts.append(f"`{name}`{{ #{place} }} <small>{_typed(field)}; {_default(field)}</small>\n:   {meaning}\n\n")
    return "".join(parts)


def _typed(field: FieldInfo) -> str:
    limits = [
        f"{words} {getattr(limit, key):,}"
        for limit in field.metadata
        for key, words in _LIMITS.items()
        if hasattr(limit, key)
    ]
    return ", ".join([_type(field.annotation), *limits])


def _type(annotation: Any) -> str:
    if hasattr(annotation, "__value__"):
        annotation = annotation.__value__
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is NoneType:
        return "nothing"
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(part)}`" for part in parts)
    if origin in {Union, UnionType}:
        return " or ".join(dict.fromkeys(_type(part) for part in parts if part is not NoneType))
    if origin in {list, tuple, frozenset, set}:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"table of {_type(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        page = BACKENDS if issubclass(annotation, BackendOptions) else CONFIGURATION
        return f"[{annotation.__name__}]({page.rpartition('/')[2]}#{annotation.__name__.lower()})"
    return _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "a table" if any(_configs_in(field.annotation)) else "**required**"
    if field.default_factory is not None:
        return "default described below"
    if field.default is None:
        return "not set by default"
    return f"default `{_toml(field.default)}`"


def _toml(value: object) -> str:
    if isinstance(value, Config):
        return _toml(
            {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
        )
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return json.dumps(value, default=str)


def _meaning(table: type[Config], name: str) -> str:
    """What is written below a key, or beside it, where it was declared."""
    said = (_meanings(base).get(name) for base in table.__mro__ if name in vars(base).get("__annotations__", {}))
    field = table.model_fields[name].annotation
    below = [_said(each).partition("\n\n")[0] for each, _ in _configs_in(field)]
    return next((each for each in (*said, *below) if each), "As its name says.")


@cache
def _meanings(table: type) -> Mapping[str, str]:
    lines = inspect.getsource(sys.modules[table.__module__]).splitlines()
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.ClassDef) or node.name != table.__name__:
            continue
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = _written_at(statement, after, lines)
    return found


def _written_at(key: ast.AnnAssign, after: ast.stmt | None, lines: list[str]) -> str:
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return inspect.cleandoc(after.value.value)
    beside = re.search(r"  # (?!noqa|type|pyright)(.*)$", lines[(key.end_lineno or key.lineno) - 1])
    return f"{beside[1][0].upper()}{beside[1][1:]}." if beside else ""
