"""What our code asks of the real packages, and whether what stands in their sources gives it."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from tests.gpu_contracts.scanning import ROOT, Given, Use, files, keys_of, uses
from tests.gpu_contracts.sources import DISTRIBUTIONS, Distribution, distribution_of, signature
from tests.gpu_contracts.table import FLASH_ATTENTION, MEGATRON, TORCH, TRANSFORMER_ENGINE, VLLM
from tests.gpu_contracts.table_sglang import NOT_THEIRS, SGLANG

TABLE: Final[Mapping[str, str]] = {**TORCH, **FLASH_ATTENTION, **MEGATRON, **VLLM, **SGLANG}
SIGNATURES: Final = Path(__file__).parent / "signatures"
_STUB: Final = ROOT / "backends/meshrl_megatron/core.pyi"
_SGLANG_ENGINE: Final = ROOT / "backends/meshrl_sglang/engine.py"


@dataclass
class Contract:
    """All that our code asks of one function, class or field."""

    target: str
    asked: list[tuple[str, Given]] = field(default_factory=list)
    """Each call with its place, `FILE:LINE`."""

    @property
    def keywords(self) -> set[str]:
        """All that are given."""
        return {name for _, given in self.asked for name in given.keywords}


@cache
def found() -> tuple[Use, ...]:
    """Every use in the code."""
    return tuple(use for path in files() for use in uses(path.read_text(), path.relative_to(ROOT).as_posix()))


def unlisted(of: tuple[Use, ...]) -> list[str]:
    """The uses that the table does not have."""
    return [f"{use.file}:{use.line}: {use.key}" for use in of if use.key not in TABLE and use.key not in NOT_THEIRS]


@cache
def contracts() -> Mapping[str, Contract]:
    """By target."""
    made: defaultdict[str, list[tuple[str, Given]]] = defaultdict(list)
    for use in found():
        if target := TABLE.get(use.key):
            given = [] if use.given is None else [(f"{use.file}:{use.line}", use.given)]
            made[target] += given
    made[TABLE["meshrl_sglang/engine.py meshrl_sglang.scheduler.Processes"]] = [
        ("meshrl_sglang/engine.py", Given(0, tuple(sorted(keys_of(_SGLANG_ENGINE.read_text(), "_arguments")))))
    ]
    for target, (positional, keywords) in TRANSFORMER_ENGINE.items():
        made[target].append(("megatron/core/extensions/transformer_engine.py", Given(positional, keywords)))
    for target, named in _stubbed():
        made[target] += [("meshrl_megatron/core.pyi", named)] if named else []
    return {target: Contract(target, asked) for target, asked in made.items()}


def _stubbed() -> Iterator[tuple[str, Given | None]]:
    """What our stub of Megatron-Core says that it has: its classes with their members, and its functions."""
    places = {name.rpartition(".")[2]: target for name, target in MEGATRON.items()}
    for node in ast.parse(_STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in places:
            yield places[node.name], _named(node.args)
        if isinstance(node, ast.ClassDef) and node.name in places:
            target = places[node.name]
            fields = [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            if node.decorator_list:  # a dataclass
                yield target, Given(0, tuple(fields))
                continue
            yield from ((f"{target}.{name}", None) for name in fields)
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    yield target, _named(each.args)
                elif isinstance(each, ast.FunctionDef):
                    yield f"{target}.{'forward' if each.name == '__call__' else each.name}", _named(each.args)


def _named(arguments: ast.arguments) -> Given:
    """All parameters by their names, which our code may give them by."""
    return Given(0, tuple(each.arg for each in (*arguments.args, *arguments.kwonlyargs) if each.arg != "self"))


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
        target: signature(root, target, contract.keywords)
        for target, contract in sorted(contracts().items())
        if distribution_of(target) == distribution
    }


def used() -> list[Distribution]:
    """Those that something is asked of."""
    asked = {distribution_of(target) for target in contracts()}
    return [each for each in DISTRIBUTIONS if each in asked]
