"""Validate a table as a configuration, and report every mistake at once, in the terms of the file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Final, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshrl.config.base import Config, Keys, Paths, dotted, is_config, is_overridden, shown
from meshrl.config.neighbours import counterparts
from meshrl.errors import ConfigError, did_you_mean, nearest

C = TypeVar("C", bound=Config)


def validate(
    schema: type[C],
    table: Mapping[str, object],
    source: str | Path,
    overrides: Sequence[str] = (),
    folder: Path = Path(),
) -> C:
    """Validate a table as a `schema`, with absolute paths. Raises one ConfigError that lists every mistake.

    `overrides`: those already in the table. Their mistakes are attributed to the command line, and their paths start at
    the current folder. Other paths start at `folder`. Nothing is converted: "3" is not an integer, and 1 is not a
    boolean. An integer is accepted as a number.
    """
    read = _checked(schema, table, source, overrides, folder)
    if isinstance(read, list):
        raise ConfigError(as_list(read))
    return read


def mistakes_in(
    schema: type[Config],
    table: Mapping[str, object],
    source: str | Path,
    overrides: Sequence[str] = (),
    folder: Path = Path(),
) -> list[str]:
    """Return the mistakes that `validate` would raise, one text for each."""
    read = _checked(schema, table, source, overrides, folder)
    return read if isinstance(read, list) else []


def _checked(
    schema: type[C], table: Mapping[str, object], source: str | Path, overrides: Sequence[str], folder: Path
) -> C | list[str]:
    overridden = [override.removeprefix("~").partition("=")[0].strip() for override in overrides]
    paths = Paths(folder, overridden)
    table = paths.in_table(schema, table)
    whole, mistakes = schema.prepared(table), paths.mistakes
    try:
        # As JSON, because pydantic's strict mode then still turns arrays into tuples and texts into paths.
        read = schema.model_validate_json(json.dumps(whole, default=str), strict=True)
        if not mistakes:
            return read
    except ValidationError as error:
        # A value filled in from another key is reported at that key, and so is one that would be.
        implied = {(key,) for key in schema.implied(table) if key not in table}
        mistakes += [
            (path, text)
            for path, text in mistakes_of(schema, whole, error.errors(include_url=False))
            if (lookup(table, path) is ABSENT) == (lookup(whole, path) is ABSENT) and path not in implied
        ]
    return [
        f"{'command line' if _by_command_line(table, path, overridden) else source}: {text}" for path, text in mistakes
    ]


def _by_command_line(table: Mapping[str, object], path: Keys, overridden: Sequence[str]) -> bool:
    """True if the command line gave the value at these keys, or all values of the table there."""
    if is_overridden(path, overridden):
        return True
    value = lookup(table, path)
    below = value if isinstance(value, Mapping) else {}
    return bool(below) and all(_by_command_line(table, (*path, str(key)), overridden) for key in below)


def as_list(mistakes: Sequence[str]) -> str:
    """Return one mistake unchanged, and several under a line that counts them."""
    if len(mistakes) == 1:
        return mistakes[0]
    return f"{len(mistakes)} mistakes:\n" + "\n".join(f"  {mistake}" for mistake in mistakes)


class _Place(NamedTuple):
    """The place of an error."""

    path: Keys
    """The keys that lead there, without pydantic's names of union members."""
    unions: tuple[tuple[int, int], ...]
    """For each union on the way, the index of its member's name in pydantic's location, and its depth in the path."""
    table: object
    """The expected type of the table that contains the last key."""


_OF_ROLLOUTS: Final = "keep", "late", "swap", "retries"
"""Arguments of `rl.rollouts`, which users look for in the configuration."""
_UNSET: Final = {"false", "''", "'none'", "'None'", "'null'"}
"""What users write to unset a key, as it is shown."""
_NOT_WRITTEN: Final = "callable_type", "default_factory_not_called"
"""Errors that no file can cause, and errors of defaults derived from an invalid value."""


def mistakes_of(
    schema: type[Config], table: Mapping[str, object], errors: list[ErrorDetails]
) -> list[tuple[Keys, str]]:
    """Return pydantic's errors in a table, each with the keys that lead there, in the order they were found."""
    errors = [error for error in errors if error["type"] not in _NOT_WRITTEN]
    found: dict[Keys, list[str]] = {}
    needed = set[Keys]()
    for place, error in _fitting(table, [(_resolve(schema, error["loc"]), error) for error in errors]):
        if _is_needed(place):
            needed.add(place.path)
        found.setdefault(place.path, []).append(_message(schema, table, place, error))
    mistakes: list[tuple[Keys, str]] = []
    for path, texts in found.items():
        key = dotted(path)
        value = lookup(table, path)
        unknown = any(text.startswith("no such key") for text in texts)
        hidden = unknown or value is ABSENT or isinstance(value, Mapping)
        begin = f"{key}: " if hidden else f"{key} = {shown(value)}: "
        unset = not hidden and path not in needed and shown(value) in _UNSET
        remedy = f"; to unset it, write '~{key}' on the command line, or leave it out" if unset else ""
        mistakes.append((path, (begin if key else "") + ", or ".join(dict.fromkeys(texts)) + remedy))
    return mistakes


def _is_needed(place: _Place) -> bool:
    """True for a key without a default, and for what is in a list."""
    fields = place.table.model_fields if is_config(place.table) and place.path else {}
    field = fields.get(str(place.path[-1])) if fields else None
    return (field is not None and field.is_required()) or not all(isinstance(part, str) for part in place.path)


def _fitting(
    table: Mapping[str, object], errors: Sequence[tuple[_Place, ErrorDetails]]
) -> Sequence[tuple[_Place, ErrorDetails]]:
    """If a table may have several forms, keep only the errors of the form that fits best."""
    unions = {(error["loc"][:at], place.path[:depth]) for place, error in errors for at, depth in place.unions}
    for loc, path in sorted(unions, key=lambda union: -len(union[0])):  # the innermost first
        if not isinstance(lookup(table, path), Mapping):
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
    """How badly a form fits a table, by its errors: no table, unknown keys, wrong values, missing keys."""
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
            annotation = next((each for each in members if _is_named(part, each)), None)
        elif part != "[key]":
            path.append(part)
            table = members[0] if members else None
            annotation = _below(table, part)
    return _Place(tuple(path), tuple(unions), table)


def _is_named(part: str | int, member: object) -> bool:
    """True if pydantic means this member of a union. One with a validator is `function-after[..., Name]`."""
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
    if is_config(annotation):
        return _keys(annotation).get(str(part))
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return arguments[1]
    if origin is tuple and arguments[-1] is not Ellipsis and isinstance(part, int):
        return arguments[min(part, len(arguments) - 1)]
    return arguments[0] if arguments else None


def _keys(schema: type[Config]) -> dict[str, object]:
    """The keys of a table, each with the type of its value."""
    fields = {name: cast("object", field.annotation) for name, field in schema.model_fields.items()}
    return fields | dict(schema.open_tables())


ABSENT = object()


def lookup(table: object, path: Keys) -> object:
    """The value at these keys. `ABSENT` if there is none."""
    for part in path:
        try:
            table = table[part]  # type: ignore[index]
        except (LookupError, TypeError):
            return ABSENT
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


def _message(schema: type[Config], table: Mapping[str, object], place: _Place, error: ErrorDetails) -> str:
    kind = error["type"]
    context: Mapping[str, object] = error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return _unknown(schema, table, place)
    if kind == "literal_error":
        known = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        hint = did_you_mean(str(lookup(table, place.path)), known)
        return f"must be {context['expected']}" + (hint and f"; {hint}")
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}"
    # "Input should be greater than 0", "Tuple should have at least 1 item ..."
    text = error["msg"].replace("Input should", "must", 1).replace(" should ", " must ", 1)
    return text[0].lower() + text[1:]


def _unknown(schema: type[Config], table: Mapping[str, object], place: _Place) -> str:
    path, above = place.path, place.path[:-1]
    paths = list(key_paths(schema))
    if hints := counterparts(path, lookup(table, path), [dotted(each) for each in paths]):
        return f"no such key; {'; '.join(hints)}"
    if not above and path[0] in _OF_ROLLOUTS:
        return f"no such key; {path[0]} is an argument of `rl.rollouts` in the script: copy one with `meshrl new`"
    known = sorted(_keys(place.table)) if is_config(place.table) else []
    near = nearest(str(path[-1]), known)
    if near:
        return f"no such key; did you mean {dotted((*above, near))}?"
    has = f"{dotted(above) or 'the file'} has {', '.join(known)}"
    elsewhere = [each for each in paths if each[-1] == path[-1]]
    if path in elsewhere:  # in another form of the table
        return f"no such key together with the others; with these {has}"
    return f"no such key; did you mean {dotted(elsewhere[0])}?" if elsewhere else f"no such key; {has}"


def key_paths(schema: type[Config], above: Keys = ()) -> Iterator[Keys]:
    """Yield the path of each key that a configuration may have, tables before their content."""
    for name, annotation in _keys(schema).items():
        yield (*above, name)
        for member in _members(annotation):
            if is_config(member) and len(above) < 6:
                yield from key_paths(member, (*above, name))
