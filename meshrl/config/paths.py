"""Paths in a configuration: relative to the file that names them, or to the current folder on the command line."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Final, TypeGuard, Union, cast, get_args, get_origin

from meshrl.config.base import Config, Keys, Table, dotted, shown


@dataclass(frozen=True)
class PathIn:
    r"""Marks a text field that may hold a path: `Annotated[str, PathIn(r"(.+\.py):.*")]`."""

    pattern: str
    """Pattern of a text with a path, which is the first group. Other texts are left unchanged."""
    name: str | None = None
    """Pattern of a path that may be another kind of name too. It is taken as a name if no file exists there."""


CODE: Final = PathIn(r"(?:\w+:)?(.+\.py):.*")
"""Marks a configuration key for `load_name`, perhaps after a word and a colon."""


def is_given(path: Keys, given: Collection[str]) -> bool:
    """True if the command line gave the value at these keys. `given` holds dotted keys."""
    key = dotted(path)
    return any(key == each or key.startswith((f"{each}.", f"{each}[")) for each in given)


def with_absolute_paths(
    schema: type[Config], table: Mapping[str, object], folder: Path, given: Collection[str]
) -> tuple[Table, list[tuple[Keys, str]]]:
    """Return the table with absolute paths, and mistakes, each with the keys that lead there.

    A path starts at `folder`, or under a key of `given` at the current folder. A path that exists only at the other of
    the two is a mistake.
    """
    walk = _Walk(folder.resolve(), given)
    return walk.table(schema, table, ()), walk.mistakes


class _Walk:
    def __init__(self, folder: Path, given: Collection[str]) -> None:
        self._folder = folder
        self._here = Path.cwd()
        self._given = given
        self.mistakes: list[tuple[Keys, str]] = []

    def table(self, schema: type[Config], table: Mapping[str, object], above: Keys) -> Table:
        fields = schema.model_fields
        others = schema.open_tables() if table.keys() - fields.keys() else {}
        placed: Table = {}
        for key, value in table.items():
            path = (*above, key)
            if field := fields.get(key):
                placed[key] = self._value(field.annotation, self._marked(field.metadata, value, path), path)
            else:
                placed[key] = self._value(others.get(key), value, path)
        return placed

    def _value(self, annotation: object, value: object, path: Keys) -> object:
        annotation = getattr(annotation, "__value__", annotation)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._value(arguments[0], self._marked(arguments[1:], value, path), path)
        if origin is Union or origin is UnionType:
            for member in arguments:
                value = self._value(member, value, path)
        elif isinstance(value, Mapping):
            table = cast("Mapping[str, object]", value)
            if _is_config(annotation):
                return self.table(annotation, table, path)
            if len(arguments) == 2:
                return {key: self._value(arguments[1], each, (*path, key)) for key, each in table.items()}
        elif isinstance(value, list) and arguments:
            # A list in place of a table is treated like the table's values.
            item = arguments[-1] if isinstance(origin, type) and issubclass(origin, Mapping) else arguments[0]
            return [self._value(item, each, (*path, at)) for at, each in enumerate(value)]
        return value

    def _marked(self, marks: Sequence[object], value: object, path: Keys) -> object:
        for mark in marks:
            if isinstance(mark, PathIn) and isinstance(value, str):
                value = self._text(mark, value, path)
        return value

    def _text(self, mark: PathIn, text: str, path: Keys) -> str:
        """Return the text with its path absolute."""
        found = re.fullmatch(mark.pattern, text)
        if found is None or "\0" in text:
            return text
        is_ours = is_given(path, self._given)
        root, other = (self._here, self._folder) if is_ours else (self._folder, self._here)
        sought, beside = root / found[1], other / found[1]
        if not _is_there(sought):
            if _is_there(beside):
                told = f"{dotted(path)} = {shown(text)}: there is no {sought}, but there is {beside}"
                start = (
                    "on the command line start at the current folder" if is_ours else "in a file start at its folder"
                )
                self.mistakes.append((path, f"{told}: paths {start}: write {os.path.relpath(beside, root)}"))
            elif mark.name and re.fullmatch(mark.name, found[1]):
                return text
        # Do not resolve the last part: the interpreter of an environment is a link.
        return text[: found.start(1)] + str(sought.parent.resolve() / sought.name) + text[found.end(1) :]


def _is_config(annotation: object) -> TypeGuard[type[Config]]:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as for a name that is too long
        return False
