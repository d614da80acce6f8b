"""How our code calls packages where only a GPU or a service runs a line, and whether their sources take it."""

import ast
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.contracts.sources import Distribution, distribution_of, signature

HERE: Final = Path(__file__).parent
SIGNATURES: Final = HERE / "signatures"


class Given(NamedTuple):
    """What a function is called with."""

    positional: int = 0
    keywords: Sequence[str] = ()
    open: bool = False
    """Whether more may be given."""


CALLS: Final[Mapping[str, Given]] = {
    target: Given(**given) for target, given in tomllib.loads((HERE / "calls.toml").read_text("utf-8")).items()
}


def refusal(signature: str, given: Given) -> str:
    """Why what has this signature cannot be called so; empty where it can."""
    if not signature.startswith("("):
        return ""  # a field that holds a function, or a module
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    takes = function.args
    positional = [each.arg for each in (*takes.posonlyargs, *takes.args)]
    if given.positional > len(positional) and not takes.vararg:
        return f"takes {len(positional)} positional arguments and is given {given.positional}"
    left = {*positional[given.positional :], *(each.arg for each in takes.kwonlyargs)}
    if unknown := [name for name in given.keywords if name not in left and not takes.kwarg]:
        return f"does not take {', '.join(unknown)}"
    optional = {*positional[len(positional) - len(takes.defaults) :]}
    optional |= {each.arg for each, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default}
    missing = sorted(left - optional - {*given.keywords})
    return f"must be given {', '.join(missing)}" if missing and not given.open else ""


def read(distribution: Distribution) -> Mapping[str, str]:
    """The signatures that are committed, by target."""
    lines = (SIGNATURES / f"{distribution.title}.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def real(distribution: Distribution, root: Path) -> Mapping[str, str]:
    """What stands in the sources below `root`. LookupError where something is not there."""
    return {
        target: signature(root, target, given.keywords)
        for target, given in sorted(CALLS.items())
        if distribution_of(target) == distribution
    }
