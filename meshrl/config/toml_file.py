"""Read TOML files and command line overrides into tables."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from meshrl.config.base import Table, dotted, leaves, shown
from meshrl.config.neighbours import counterparts
from meshrl.errors import ConfigError, did_you_mean, nearest, shortened

DEEPEST: Final = 100
"""Maximal nesting of lists and tables, in a configuration and in a task's row."""
_TOO_DEEP: Final = f"lists and tables are nested more than {DEEPEST} deep: make it flatter"


def load_toml(path: str | Path, overrides: Sequence[str] = ()) -> Table:
    """Read the tables of a TOML file, and apply `key.sub=value` overrides. `~key.sub` removes a key or a table.

    A value is read as TOML (`3`, `true`, `[1, 2]`, `{a = 1}`) and taken as text if it is not valid TOML. Raises
    ConfigError if the file is missing, not valid TOML or nested too deeply, or if an override does not fit it.
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
    except ValueError as error:  # from TOML, and from a number with too many digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from error
    if too_deep(table):
        raise ConfigError(f"{path}: {_TOO_DEEP}")
    apply_overrides(table, overrides)
    return table


def apply_overrides(table: Table, overrides: Sequence[str]) -> None:
    """Apply `key.sub=value` overrides to a table, as `load_toml` does. Raises ConfigError if one does not fit."""
    for override in overrides:
        _put(table, override)
        if too_deep(table):
            raise ConfigError(f"command line: {shortened(override)}: {_TOO_DEEP}")


def too_deep(value: object) -> bool:
    """True if lists and tables are nested more than `DEEPEST` deep."""
    below = [(0, value)]
    while below:
        depth, value = below.pop()
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
        if inner is not None and depth == DEEPEST:
            return True
        below += [(depth + 1, each) for each in inner or ()]
    return False


def _put(table: Table, override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.removeprefix("~").split(".")]
    if key.startswith("~"):
        _remove(table, override, parts)
        return
    if not equals or not all(parts):
        raise ConfigError(
            f"command line: {override!r} is not an override: write key.sub=value, such as policy.optimizer.lr=1e-4"
        )
    target = table
    for depth, part in enumerate(parts[:-1], start=1):
        below = target.setdefault(part, {})
        if not isinstance(below, dict):
            if counterparts(tuple(parts), None):
                table[dotted(parts)] = _value(text.strip())  # an unknown key, reported with the other mistakes
                return
            raise ConfigError(
                f"command line: {override}: {dotted(parts[:depth])} is {shown(below)} in the file, "
                f"which has no key {parts[depth]!r}; give the whole value, as in {dotted(parts[:depth])}=..."
            )
        target = below
    target[parts[-1]] = _value(text.strip())


def _remove(table: Table, override: str, parts: Sequence[str]) -> None:
    above: object = table
    for part in parts[:-1]:
        above = above.get(part) if isinstance(above, dict) else None
    if "=" in override or not isinstance(above, dict) or parts[-1] not in above:
        keys = dict.fromkeys(dotted(path[:depth]) for path, _ in leaves(table) for depth in range(1, len(path) + 1))
        hint = did_you_mean(dotted(parts), keys, "~{}") or "write ~key.sub for a key that the file sets"
        raise ConfigError(f"command line: {override}: {dotted(parts)} is not set, so it cannot be removed; {hint}")
    del above[parts[-1]]


def _value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # from TOML, a number with too many digits, or deep brackets
        return text
    return parsed["value"] if len(parsed) == 1 else text
