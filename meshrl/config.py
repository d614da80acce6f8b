"""Configuration: frozen pydantic models read from TOML, and every mistake in a file told at once."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Final, NamedTuple, TypeGuard, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from meshrl.errors import ConfigError, did_you_mean, nearest, shortened

C = TypeVar("C", bound="Config")
Keys = tuple[str | int, ...]
Table = dict[str, object]

DEEPEST: Final = 100
"""How deep lists and tables may stand in each other, in a configuration and in a row of a task."""


class Config(BaseModel):
    """The base of every configuration table: frozen, and an unknown key is an error.

    A validator of a subclass raises ValueError; `validate` says where in the file it happened.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """The table of a file with what follows from other keys filled in, before it is validated."""
        return table

    @classmethod
    def open_tables(cls) -> Mapping[str, type["Config"]]:
        """The tables that it takes beside its fields, where these are not known before a file is read."""
        return {}


def load_toml(path: str | Path, overrides: Sequence[str] = ()) -> Table:
    """The tables of a TOML file, with `key.sub=value` overrides put over them.

    A value is read as TOML (`3`, `true`, `[1, 2]`, `{a = 1}`) and, where it is none, taken as text.
    """
    path = Path(path)
    try:
        table: Table = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError as error:
        beside = [each.name for each in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        hint = nearest(path.name, beside)
        raise ConfigError(
            f"{path}: no such file" + (f"; did you mean {path.parent / hint}?" if hint else "")
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder, not a TOML file") from error
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise ConfigError(
            f"{path}: not valid TOML: line {line} has the byte {byte:#04x}, which is not UTF-8: save the file as UTF-8"
        ) from error
    except ValueError as error:  # of TOML, and of a number with too many digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from error
    if too_deep(table):
        raise ConfigError(f"{path}: {_TOO_DEEP}")
    for override in overrides:
        _put(table, override)
        if too_deep(table):
            raise ConfigError(f"command line: {shortened(override)}: {_TOO_DEEP}")
    return table


_TOO_DEEP: Final = f"lists and tables stand in each other more than {DEEPEST} deep: make it flatter"


def too_deep(value: object) -> bool:
    """Whether lists and tables stand in each other more than `DEEPEST` deep."""
    below = [(0, value)]
    while below:
        depth, value = below.pop()
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
        if inner is not None and depth == DEEPEST:
            return True
        below += [(depth + 1, each) for each in inner or ()]
    return False


def validate(
    schema: type[C],
    table: Mapping[str, object],
    source: str | Path,
    overrides: Sequence[str] = (),
) -> C:
    """The table as a `schema`, or one ConfigError that lists every mistake in it.

    `overrides`: those already in the table, so that a mistake in one is told as the command line's.
    Nothing is converted: "3" is no integer, and 1 is no boolean; an integer is a number.
    """
    whole = schema.prepared(table)
    try:
        # As JSON, where pydantic's strict mode still turns arrays into tuples and texts into paths.
        return schema.model_validate_json(json.dumps(whole, default=str), strict=True)
    except ValidationError as error:
        found = _mistakes(schema, whole, error.errors(include_url=False))
    # A value that was filled in from another key is told there.
    found = [
        (path, text) for path, text in found if (_lookup(table, path) is _ABSENT) == (_lookup(whole, path) is _ABSENT)
    ]
    given = [override.partition("=")[0].strip() for override in overrides]
    lines: list[str] = []
    for path, text in found:
        key = dotted(path)
        ours = any(key == each or key.startswith((f"{each}.", f"{each}[")) for each in given)
        lines.append(f"{'command line' if ours else source}: {text}")
    raise ConfigError(as_list(lines))


def as_list(mistakes: Sequence[str]) -> str:
    """One mistake as it is; several under a line that counts them."""
    if len(mistakes) == 1:
        return mistakes[0]
    return f"{len(mistakes)} mistakes:\n" + "\n".join(f"  {mistake}" for mistake in mistakes)


def dotted(path: Sequence[str | int]) -> str:
    """`("meshes", "main", 0)` as `meshes.main[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _put(table: Table, override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(
            f"command line: {override!r} is no override; write key.sub=value, as in policy.optimizer.lr=1e-4"
        )
    here = table
    for depth, part in enumerate(parts[:-1], start=1):
        below = here.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(
                f"command line: {override}: {dotted(parts[:depth])} is {_shown(below)} in the file, "
                f"which has no key {parts[depth]!r}; give the whole of it, as in {dotted(parts[:depth])}=..."
            )
        here = below
    here[parts[-1]] = _value(text.strip())


def _value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # of TOML, of a number with too many digits, and of nothing but brackets
        return text
    return parsed["value"] if len(parsed) == 1 else text


# --- pydantic's errors, told in the words of the file ---------------------------------------------


class _Place(NamedTuple):
    """Where an error is."""

    path: Keys
    """The keys that lead there, without pydantic's names of union members."""
    unions: tuple[tuple[int, int], ...]
    """Of each union on the way: where its member is named in pydantic's location, and how deep it is in the path."""
    table: object
    """What the table that the last key stands in should have been."""


def _mistakes(schema: type[Config], table: Mapping[str, object], errors: list[ErrorDetails]) -> list[tuple[Keys, str]]:
    found: dict[Keys, list[str]] = {}
    for place, error in _fitting(table, [(_resolve(schema, error["loc"]), error) for error in errors]):
        found.setdefault(place.path, []).append(_told(schema, table, place, error))
    lines: list[tuple[Keys, str]] = []
    for path, texts in found.items():
        key = dotted(path)
        value = _lookup(table, path)
        unknown = any(text.startswith("no such key") for text in texts)
        hidden = unknown or value is _ABSENT or isinstance(value, Mapping)
        shown = "" if hidden else f" = {_shown(value)}"
        lines.append(
            (
                path,
                (f"{key}{shown}: " if key else "") + ", or ".join(dict.fromkeys(texts)),
            )
        )
    return lines


def _fitting(
    table: Mapping[str, object], errors: Sequence[tuple[_Place, ErrorDetails]]
) -> Sequence[tuple[_Place, ErrorDetails]]:
    """Without what other forms of a table say, where it may have several: it is judged as the form that fits best."""
    unions = {(error["loc"][:at], place.path[:depth]) for place, error in errors for at, depth in place.unions}
    for loc, path in sorted(unions, key=lambda union: -len(union[0])):  # the innermost first
        if not isinstance(_lookup(table, path), Mapping):
            continue
        at = len(loc)
        forms: dict[str | int, list[ErrorDetails]] = {}
        for _, error in errors:
            if error["loc"][:at] == loc and len(error["loc"]) > at:
                forms.setdefault(error["loc"][at], []).append(error)
        best = min(forms, key=lambda form: _misfit(forms[form], at + 1))
        errors = [each for each in errors if each[1]["loc"][:at] != loc or each[1]["loc"][at:][:1] == (best,)]
    return errors


def _misfit(errors: Sequence[ErrorDetails], at: int) -> tuple[bool, int, int, int]:
    """How badly a form fits a table, by its errors: no table at all, unknown keys, wrong values, keys left out."""
    kinds = [error["type"] for error in errors]
    no_table = any(len(error["loc"]) == at and error["type"] != "value_error" for error in errors)
    unknown, missing = kinds.count("extra_forbidden"), kinds.count("missing")
    return no_table, unknown, len(kinds) - unknown - missing, missing


def _resolve(schema: type[Config], loc: Keys) -> _Place:
    path: list[str | int] = []
    unions: list[tuple[int, int]] = []
    annotation: object = schema
    table: object = None
    for at, part in enumerate(loc):
        members = _members(annotation)
        if len(members) > 1:
            unions.append((at, len(path)))
            annotation = next((each for each in members if _names(part, each)), None)
        elif part != "[key]":
            path.append(part)
            table = members[0] if members else None
            annotation = _below(table, part)
    return _Place(tuple(path), tuple(unions), table)


def _names(part: str | int, member: object) -> bool:
    """Whether pydantic means this member of a union: one with a validator is `function-after[..., Name]`."""
    name = getattr(member, "__name__", None)
    return part == name or str(part).rstrip("]").endswith(f", {name}")


def _members(annotation: object) -> list[object]:
    """The types that a value may have, without None."""
    annotation = getattr(annotation, "__value__", annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin is Union or origin is UnionType:
        return [each for each in get_args(annotation) if each is not NoneType]
    return [annotation]


def _below(annotation: object, part: str | int) -> object:
    if _is_config(annotation):
        return _keys(annotation).get(str(part))
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return arguments[1]
    if origin is tuple and arguments[-1] is not Ellipsis and isinstance(part, int):
        return arguments[min(part, len(arguments) - 1)]
    return arguments[0] if arguments else None


def _is_config(annotation: object) -> TypeGuard[type[Config]]:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _keys(schema: type[Config]) -> dict[str, object]:
    """Each key of a table, and what its value may be."""
    fields = {name: cast("object", field.annotation) for name, field in schema.model_fields.items()}
    return fields | dict(schema.open_tables())


_ABSENT = object()


def _lookup(table: object, path: Keys) -> object:
    for part in path:
        try:
            table = table[part]  # type: ignore[index]
        except (LookupError, TypeError):
            return _ABSENT
    return table


_WANTED = {
    "string_type": "text in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a table",
    "dict_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}


def _told(schema: type[Config], table: Mapping[str, object], place: _Place, error: ErrorDetails) -> str:
    kind = error["type"]
    context: Mapping[str, object] = error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return _unknown(schema, place)
    if kind == "literal_error":
        known = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        hint = did_you_mean(str(_lookup(table, place.path)), known)
        return f"must be {context['expected']}" + (hint and f"; {hint}")
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}"
    # "Input should be greater than 0", "Tuple should have at least 1 item ..."
    text = error["msg"].replace("Input should", "must", 1).replace(" should ", " must ", 1)
    return text[0].lower() + text[1:]


def _unknown(schema: type[Config], place: _Place) -> str:
    path, above = place.path, place.path[:-1]
    known = sorted(_keys(place.table)) if _is_config(place.table) else []
    near = nearest(str(path[-1]), known)
    if near:
        return f"no such key; did you mean {dotted((*above, near))}?"
    has = f"{dotted(above) or 'the file'} has {', '.join(known)}"
    elsewhere = [each for each in _paths(schema) if each[-1] == path[-1]]
    if path in elsewhere:  # in another form of the table
        return f"no such key beside the others; with these {has}"
    return f"no such key; did you mean {dotted(elsewhere[0])}?" if elsewhere else f"no such key; {has}"


def _paths(schema: type[Config], above: Keys = ()) -> Iterator[Keys]:
    for name, annotation in _keys(schema).items():
        yield (*above, name)
        for member in _members(annotation):
            if _is_config(member) and len(above) < 6:
                yield from _paths(member, (*above, name))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(value)
