"""The base of configuration tables, and how keys and values are written in messages."""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

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


def shown(value: object) -> str:
    """Return a value as error messages show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(value)
