"""The base of configuration tables: keys, values and paths in them."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, ClassVar, Final, TypeGuard, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict

from meshrl.errors import shortened

Keys = tuple[str | int, ...]
Table = dict[str, object]


class Config(BaseModel):
    """The base of every configuration table: frozen, and an unknown key is an error.

    A validator of a subclass raises ValueError, and `validate` adds where in the file the mistake is.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """Fill in keys of a file's table that follow from other keys, before it is validated."""
        return table

    @classmethod
    def implied(cls, table: Mapping[str, object]) -> Collection[str]:  # noqa: ARG003 -- for subclasses that need it
        """Keys that are not reported as missing, because `prepared` fills them in from another missing key."""
        return ()

    @classmethod
    def open_tables(cls) -> Mapping[str, type["Config"]]:
        """The tables that it accepts in addition to its fields, which are known only when a file is read."""
        return {}


def dotted(path: Sequence[str | int]) -> str:
    """Write `("meshes", "main", 0)` as `meshes.main[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def leaves(value: object, above: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Yield each value in nested tables, with the keys that lead to it. An empty table is a value."""
    if isinstance(value, Mapping) and value:
        for key, below in cast("Mapping[str, object]", value).items():
            yield from leaves(below, (*above, str(key)))
    else:
        yield above, value


def shown(value: object) -> str:
    """Return a value as error messages show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(value)


@dataclass(frozen=True)
class PathIn:
    r"""Marks a text field that may hold a path: `Annotated[str, PathIn(r"(.+\.py):.*")]`."""

    pattern: str
    """Pattern of a text with a path, which is the first group. Other texts are left unchanged."""
    name: str | None = None
    """Pattern of a path that may be another kind of name too. It is taken as a name if no file exists there."""


CODE: Final = PathIn(r"(?:\w+:)?(.+\.py):.*")
"""Marks a configuration key for `load_name`, perhaps after a word and a colon."""


def is_overridden(path: Keys, overridden: Collection[str]) -> bool:
    """True if the command line gave the value at these keys. `overridden` holds dotted keys."""
    key = dotted(path)
    return any(key == each or key.startswith((f"{each}.", f"{each}[")) for each in overridden)


class Paths:
    """Makes the paths of tables absolute.

    A path starts at `folder`, or under an `overridden` key at the current folder. A path that exists only at the other
    of the two is a mistake.
    """

    def __init__(self, folder: Path, overridden: Collection[str]) -> None:
        self._folder, self._here, self._overridden = folder.resolve(), Path.cwd(), overridden
        self.mistakes: list[tuple[Keys, str]] = []
        """Each with the keys that lead there."""

    def in_table(self, schema: type[Config], table: Mapping[str, object], above: Keys = ()) -> Table:
        """Return the table with absolute paths, and add to the mistakes."""
        fields = schema.model_fields
        others = schema.open_tables() if table.keys() - fields.keys() else {}
        absolute: Table = {}
        for key, value in table.items():
            path, field = (*above, key), fields.get(key)
            marked = self._in_marked(field.metadata, value, path) if field else value
            absolute[key] = self._in_value(field.annotation if field else others.get(key), marked, path)
        return absolute

    def _in_value(self, annotation: object, value: object, path: Keys) -> object:
        annotation = getattr(annotation, "__value__", annotation)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._in_value(arguments[0], self._in_marked(arguments[1:], value, path), path)
        if origin is Union or origin is UnionType:
            for member in arguments:
                value = self._in_value(member, value, path)
        elif isinstance(value, Mapping):
            table = cast("Mapping[str, object]", value)
            if is_config(annotation):
                return self.in_table(annotation, table, path)
            if len(arguments) == 2:
                return {key: self._in_value(arguments[1], each, (*path, key)) for key, each in table.items()}
        elif isinstance(value, list) and arguments:
            # A list in place of a table is treated like the table's values.
            item = arguments[-1] if isinstance(origin, type) and issubclass(origin, Mapping) else arguments[0]
            return [self._in_value(item, each, (*path, at)) for at, each in enumerate(value)]
        return value

    def _in_marked(self, marks: Sequence[object], value: object, path: Keys) -> object:
        for mark in marks:
            if isinstance(mark, PathIn) and isinstance(value, str):
                value = self._in_text(mark, value, path)
        return value

    def _in_text(self, mark: PathIn, text: str, path: Keys) -> str:
        match = re.fullmatch(mark.pattern, text)
        if match is None or "\0" in text:
            return text
        by_command_line = is_overridden(path, self._overridden)
        root, other = (self._here, self._folder) if by_command_line else (self._folder, self._here)
        try:
            name = match[1] if "$" in match[1] and _exists(root / match[1]) else expanded(match[1])
        except ValueError as error:
            self.mistakes.append((path, f"{dotted(path)} = {shown(text)}: {error}"))
            return text
        wanted, elsewhere = root / name, other / name
        if not _exists(wanted):
            if _exists(elsewhere):
                start = "on the command line start at the current" if by_command_line else "in a file start at its"
                mistake = (
                    f"{dotted(path)} = {shown(text)}: there is no {wanted}, but there is {elsewhere}: paths {start}"
                )
                self.mistakes.append((path, f"{mistake} folder: write {os.path.relpath(elsewhere, root)}"))
            elif mark.name and re.fullmatch(mark.name, match[1]):
                return text
        # Do not resolve the last part: the interpreter of an environment is a link.
        return text[: match.start(1)] + str(wanted.parent.resolve() / wanted.name) + text[match.end(1) :]


def expanded(path: str) -> str:
    """Return a path with its `~` and `$VARIABLES` replaced. ValueError for those that are not known here."""
    whole = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 -- a Path would drop the slash of `x/`
    if whole.startswith("~"):
        user = whole.partition("/")[0]
        raise ValueError(
            f"the home folder of {user} is not known here: write the whole path, or ./{user} for that name"
        )
    if unset := re.search(r"\$(?:\w+|\{\w+\})", whole):
        raise ValueError(f"{unset[0]} is not set in the environment: export it, or write the whole path")
    return whole


def is_config(annotation: object) -> TypeGuard[type[Config]]:
    """True for a configuration table."""
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as for a name that is too long
        return False
