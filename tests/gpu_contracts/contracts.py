"""What our code asks of the real packages, and whether what stands in their sources gives it."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tests.gpu_contracts.scanning import OBJECTS, ROOT, TRANSFORMER_ENGINE, Given, found, is_foreign, keys_of, listed
from tests.gpu_contracts.sources import Distribution, distribution_of, signature

SIGNATURES: Final = Path(__file__).parent / "signatures"
_SGLANG_ENGINE: Final = "meshrl_sglang/engine.py"


def target_of(key: str) -> str | None:
    """The full name of what is used; None of what is not theirs, or what nothing tells."""
    name = listed(key)
    if name and name in OBJECTS:
        return OBJECTS[name] + key.removeprefix(name)
    return key if name is None and is_foreign(key) else None


@cache
def contracts() -> Mapping[str, list[tuple[str, Given]]]:
    """By target all calls that our code makes of it, each with its place, `FILE:LINE`; none of what it only names."""
    made: defaultdict[str, list[tuple[str, Given]]] = defaultdict(list)
    for use in found():
        if target := target_of(use.key):
            made[target] += [] if use.given is None else [(f"{use.file}:{use.line}", use.given)]
    arguments = keys_of((ROOT / "backends" / _SGLANG_ENGINE).read_text(), "_arguments")
    processes = OBJECTS[f"{_SGLANG_ENGINE} meshrl_sglang.scheduler.Processes"]
    made[processes] = [(_SGLANG_ENGINE, Given(0, tuple(sorted(arguments))))]
    return made | {target: [] for target in TRANSFORMER_ENGINE}


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
        target: signature(root, target, {name for _, given in asked for name in given.keywords})
        for target, asked in sorted(contracts().items())
        if distribution_of(target) == distribution
    }
