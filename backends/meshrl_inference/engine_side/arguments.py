"""The arguments of an engine: those that meshrl sets, and those of a user's table `args`."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any


def with_args(own: Mapping[str, Any], args: Mapping[str, Any], known: Collection[str], engine: str) -> dict[str, Any]:
    """Join both. `known`: the arguments of the installed `engine`, such as "vLLM 0.32.0".

    ValueError for an argument that the engine does not have, or that meshrl sets itself.
    """
    for name, value in args.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "its documentation lists them"
            raise ValueError(f"args has {name!r}, which is no argument of {engine}: {hint}")
        if own.get(name) is not None:
            raise ValueError(f"args has {name!r} = {value!r}, which meshrl itself sets to {own[name]!r}: remove it")
    return {**own, **args}
