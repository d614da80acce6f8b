"""Validate a table as a configuration, and report every mistake at once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from meshrl.config.base import Config, Keys
from meshrl.config.mistakes import ABSENT, lookup, mistakes_of
from meshrl.config.paths import is_given, with_absolute_paths
from meshrl.errors import ConfigError

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
    read = _judged(schema, table, source, overrides, folder)
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
    read = _judged(schema, table, source, overrides, folder)
    return read if isinstance(read, list) else []


def _judged(
    schema: type[C], table: Mapping[str, object], source: str | Path, overrides: Sequence[str], folder: Path
) -> C | list[str]:
    given = [override.partition("=")[0].strip() for override in overrides]
    table, misplaced = with_absolute_paths(schema, table, folder, given)
    read = _read(schema, table)
    mistakes = [*misplaced, *(read if isinstance(read, list) else ())]
    if isinstance(read, list) or mistakes:
        return [f"{'command line' if _is_given(table, path, given) else source}: {text}" for path, text in mistakes]
    return read


def _is_given(table: Mapping[str, object], path: Keys, given: Sequence[str]) -> bool:
    """True if the command line gave the value at these keys, or all values of the table there."""
    value = lookup(table, path)
    if is_given(path, given) or not isinstance(value, Mapping) or not value:
        return is_given(path, given)
    return all(_is_given(table, (*path, str(key)), given) for key in value)


def _read(schema: type[C], table: Mapping[str, object]) -> C | list[tuple[Keys, str]]:
    """Return the validated table, or its mistakes, each with the keys that lead there."""
    whole = schema.prepared(table)
    try:
        # As JSON, because pydantic's strict mode then still turns arrays into tuples and texts into paths.
        return schema.model_validate_json(json.dumps(whole, default=str), strict=True)
    except ValidationError as error:
        found = mistakes_of(schema, whole, error.errors(include_url=False))
    # A value filled in from another key is reported at that key, and so is one that would be.
    implied = {(key,) for key in schema.implied(table) if key not in table}
    return [
        (path, text)
        for path, text in found
        if (lookup(table, path) is ABSENT) == (lookup(whole, path) is ABSENT) and path not in implied
    ]


def as_list(mistakes: Sequence[str]) -> str:
    """Return one mistake unchanged, and several under a line that counts them."""
    if len(mistakes) == 1:
        return mistakes[0]
    return f"{len(mistakes)} mistakes:\n" + "\n".join(f"  {mistake}" for mistake in mistakes)
