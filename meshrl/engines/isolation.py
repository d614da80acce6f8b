"""Isolation of ranks: values that pass between ranks are copied or frozen."""

import copy
from collections.abc import Mapping
from typing import TypeVar, cast

from meshrl.errors import ContractError
from meshrl.mesh import HasRefs, seal_arrays

T = TypeVar("T")

_IMMUTABLE = (type(None), bool, int, float, str, bytes)
_ALONE = (HasRefs, *_IMMUTABLE)
"""Values that share no mutable parts. They are isolated one by one, which is faster than `deepcopy`."""


def isolated(value: T) -> T:
    """Return a value that shares no mutable memory with the original. Immutable ones (a `Batch`) are not copied.

    Its arrays are read-only, as with an engine that maps them from a store.
    """
    if isinstance(value, HasRefs):
        return value.__deepcopy__({})
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is tuple:
        items = cast("tuple[object, ...]", value)
        if all(isinstance(item, _ALONE) for item in items):
            return cast("T", tuple([isolated(item) for item in items]))
    alone = copy.deepcopy(value)
    seal_arrays(alone)
    return alone


def sendable(
    where: str, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Isolate a call's arguments. Raises `ContractError` for values that cannot be copied, such as a lock or a file."""
    try:
        return isolated(arguments) if arguments else (), isolated(dict(keywords)) if keywords else {}
    except TypeError as error:
        raise ContractError(
            f"{where}: an argument cannot be sent to a rank: {error}; make it on the rank, in the actor's constructor"
        ) from error
