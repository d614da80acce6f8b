"""Read an annotation: its mark, its axes and its type."""

import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from typing_extensions import TypeAliasType

from meshrl.mesh import sharding

Axes = tuple[str, ...]
EVERY_RANK: Axes = ("*",)


@dataclass(frozen=True)
class Mark:
    """One annotation: `Shard[Batch, TP]` is `Mark("shard", ("tp",), Batch)`."""

    kind: str
    axes: Axes
    type: object

    def __str__(self) -> str:
        name = self.kind.capitalize()
        axes = "" if self.axes in ((), ("dp",), EVERY_RANK) else f", {' x '.join(self.axes)}"
        return f"{name}[{type_name(self.type)}{axes}]" if self.kind != "plain" else type_name(self.type)


def read_mark(hint: object) -> Mark:
    """Read the mark on an annotation: `Mark("plain", (), hint)` if there is none."""
    alias = getattr(hint, "__origin__", None)
    if isinstance(hint, types.UnionType) or alias is typing.Union:
        marked = [read_mark(option) for option in typing.get_args(hint)]
        found = [mark for mark in marked if mark.kind != "plain"]
        return found[0] if len(found) == 1 and len(marked) == 2 else Mark("plain", (), hint)
    if not isinstance(alias, TypeAliasType) or alias not in _KINDS:
        return Mark("plain", (), hint)
    inner, *axis = typing.get_args(hint)
    kind = _KINDS[alias]
    default = {"replicate": (), "same": EVERY_RANK}.get(kind, ("dp",))
    return Mark(kind, typing.get_args(axis[0]) if axis else default, inner)


_KINDS: Mapping[TypeAliasType, str] = {
    sharding.Shard: "shard",
    sharding.Replicate: "replicate",
    sharding.Gather: "gather",
    sharding.Mean: "mean",
    sharding.Sum: "sum",
    sharding.Same: "same",
}


def read_marks(function: Callable[..., object]) -> tuple[dict[str, Mark], bool]:
    """Read a method's marks by parameter and "return", and whether it streams. NameError if a type is unknown."""
    hints = typing.get_type_hints(function, include_extras=True)
    returned = hints.get("return")
    stream = typing.get_origin(returned) in (AsyncIterator, AsyncGenerator)
    if stream:
        hints["return"] = typing.get_args(returned)[0]
    return {name: read_mark(hint) for name, hint in hints.items()}, stream


def holds_mark(hint: object) -> bool:
    """True if an annotation carries a mark or contains one."""
    return read_mark(hint).kind != "plain" or any(map(holds_mark, typing.get_args(hint)))


def type_name(hint: object) -> str:
    """The name of a type as its author wrote it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
