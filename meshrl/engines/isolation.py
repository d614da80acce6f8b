"""What ranks hand to each other is theirs alone: copied, or frozen."""

import copy
from collections.abc import Mapping
from typing import TypeVar

from meshrl.errors import ContractError
from meshrl.mesh import seal_arrays

T = TypeVar("T")

_IMMUTABLE = (type(None), bool, int, float, str, bytes)


def isolated(value: T) -> T:
    """A value that shares no mutable memory with the original. Immutable ones (a `Batch`) are themselves.

    Its arrays are read-only, as those of an engine that maps them from a store.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    alone = copy.deepcopy(value)
    seal_arrays(alone)
    return alone


def sendable(
    where: str, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """A call's arguments, isolated. Raises `ContractError` for what cannot be copied, such as a lock or a file."""
    try:
        return isolated(arguments) if arguments else (), isolated(dict(keywords)) if keywords else {}
    except TypeError as error:
        raise ContractError(
            f"{where}: an argument cannot be sent to a rank: {error}; make it on the rank, in the actor's constructor"
        ) from error
