"""The base of every configuration table, and the keys that lead to a value."""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from meshrl.errors import shortened

Keys = tuple[str | int, ...]
Table = dict[str, object]


class Config(BaseModel):
    """The base of every configuration table: frozen, and an unknown key is an error.

    A validator of a subclass raises ValueError; `validate` says where in the file it happened.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def prepared(cls, table: Mapping[str, object]) -> Mapping[str, object]:
        """The table of a file with what follows from other keys filled in, before it is validated."""
        return table

    @classmethod
    def implied(cls, table: Mapping[str, object]) -> Collection[str]:  # noqa: ARG003 -- for who has such
        """Keys that need not be told to be missing: `prepared` fills them in once another one is there that is."""
        return ()

    @classmethod
    def open_tables(cls) -> Mapping[str, type["Config"]]:
        """The tables that it takes beside its fields, where these are not known before a file is read."""
        return {}


def dotted(path: Sequence[str | int]) -> str:
    """`("meshes", "main", 0)` as `meshes.main[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def shown(value: object) -> str:
    """A value as an error tells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(value)
