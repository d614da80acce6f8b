"""A table as a configuration, and every mistake in it told at once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from meshrl.config.base import Config, dotted
from meshrl.config.mistakes import ABSENT, lookup, mistakes_of
from meshrl.errors import ConfigError

C = TypeVar("C", bound=Config)


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
        found = mistakes_of(schema, whole, error.errors(include_url=False))
    # A value that was filled in from another key is told there.
    found = [(path, text) for path, text in found if (lookup(table, path) is ABSENT) == (lookup(whole, path) is ABSENT)]
    given = [override.partition("=")[0].strip() for override in overrides]
    lines: list[str] = []
    for path, text in found:
        key = dotted(path)
        ours = any(
            key == each or key.startswith((f"{each}.", f"{each}[")) or each.startswith(f"{key}.") for each in given
        )
        lines.append(f"{'command line' if ours else source}: {text}")
    raise ConfigError(as_list(lines))


def as_list(mistakes: Sequence[str]) -> str:
    """One mistake as it is; several under a line that counts them."""
    if len(mistakes) == 1:
        return mistakes[0]
    return f"{len(mistakes)} mistakes:\n" + "\n".join(f"  {mistake}" for mistake in mistakes)
