"""Docstrings of public names say what a signature cannot: which errors, which units, which shapes."""

import ast
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from meshrl import errors

ROOT = Path(__file__).parents[1]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """A definition, the statement below it, and its file."""

    path: Path
    node: ast.stmt
    below: ast.stmt | None = None


class Public(NamedTuple):
    """A public function, method or attribute."""

    path: Path
    name: str
    node: Function | ast.AnnAssign
    docstring: str

    def types(self) -> dict[str, ast.expr]:
        """The types of the parameters and the result, or of the attribute."""
        if isinstance(self.node, ast.AnnAssign):
            return {named(self.node): self.node.annotation}
        found = [(each.arg, each.annotation) for each in ast.walk(self.node.args) if isinstance(each, ast.arg)]
        return {name: type_ for name, type_ in [*found, ("result", self.node.returns)] if type_}


def named(node: ast.stmt) -> str:
    """The name that a statement defines, or nothing."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
    return str(getattr(target, "name", getattr(target, "id", "")))


def text_of(node: ast.stmt | None) -> str:
    """A statement that is a text: the docstring of the assignment above it."""
    return ast.get_docstring(ast.Module([node], [])) or "" if node else ""


@cache
def names(path: Path) -> dict[str, Found | str]:
    """The names that a file defines, and the modules of those that it imports."""
    tree = ast.parse(path.read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # Only the stub of meshrl has relative ones.
    modules = [(node, f"{'meshrl.' * node.level}{node.module or ''}") for node in imports]
    imported = {alias.asname or alias.name: module for node, module in modules for alias in node.names}
    here = zip(tree.body, [*tree.body[1:], None], strict=True)
    return {**imported, **{named(node): Found(path, node, below) for node, below in here}}


def definition(path: Path, name: str) -> Found | None:
    """Find a name of meshrl or its backends that a file defines or imports."""
    found = names(path).get(name)
    if not isinstance(found, str):
        return found
    files = [f"{at}{found.replace('.', '/')}{end}" for at in ("", "backends/") for end in (".py", "/__init__.py")]
    return next((definition(file, name) for each in files if (file := ROOT / each).is_file() and file != path), None)


def exported() -> Iterator[Found]:
    """The functions and classes that each package gives, and what the classes inherit from."""
    for path in (path for folder in ("meshrl", "backends") for path in sorted((ROOT / folder).rglob("__init__.py"))):
        for name in names(path):
            if not name.startswith("_") and (found := definition(path, name)):
                yield from lineage(found)


def lineage(found: Found) -> Iterator[Found]:
    """A definition, and all that it inherits from."""
    yield found
    for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and (above := definition(found.path, name.id)):
            yield from lineage(above)


def members(found: Found) -> Iterator[Public]:
    """A function, or the public methods and attributes of a class."""
    path, node, _ = found
    if isinstance(node, Function):
        yield Public(path, node.name, node, ast.get_docstring(node) or "")
    if not isinstance(node, ast.ClassDef):
        return
    bodies = [each.node for each in lineage(found) if isinstance(each.node, ast.ClassDef)]
    classes = " ".join(ast.get_docstring(each) or "" for each in bodies)
    for part, below in zip(node.body, [*node.body[1:], None], strict=True):
        name = named(part)
        if not isinstance(part, Function | ast.AnnAssign) or (name.startswith("_") and not name.endswith("__")):
            continue
        same = (each for body in bodies for each in body.body if isinstance(each, Function) and each.name == name)
        own = map(ast.get_docstring, same) if isinstance(part, Function) else [text_of(below)]
        said = next(filter(None, own), "")
        said = f"{said} {classes}" if name == "__init__" else said or classes
        yield Public(path, f"{node.name}.{name}", part, said)


ERRORS = {
    name: {name, *(each.__name__ for each in value.__mro__ if each is not errors.MeshrlError)}
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.MeshrlError)
}
"""Each error of meshrl, with the names that stand for it: its own, and those that it inherits from."""


def check_errors(public: Public) -> Iterator[str]:
    """A function names each error of meshrl that it raises itself."""
    raised = (each.exc for each in ast.walk(public.node) if isinstance(each, ast.Raise))
    for name in sorted({ast.unparse(each.func) for each in raised if isinstance(each, ast.Call)} & ERRORS.keys()):
        if not any(re.search(rf"\b{each}\b", public.docstring) for each in ERRORS[name]):
            yield f"raises {name}, which no docstring says"


UNITS = {
    r"(^|_)(timeout|patience|seconds|wait|pause|interval|delay|idle|time_limit|after|every)$": (
        r"(?i)\b(milliseconds?|ms|seconds?|minutes?|hours?|steps?|updates?)\b|_seconds\b"
    ),
    r"(^|_|n)(bytes|kib|mib|gib|memory)$": r"(\b|_)(bytes?|[KMG]iB|mib|gib)\b",
}
"""Names of durations and of sizes, with the units that their docstrings may give."""


def check_units(public: Public) -> Iterator[str]:
    """A number that is a duration or a size has its unit."""
    for name, type_ in public.types().items():
        is_number = re.fullmatch(r"(Final\[)?(float|int)( \| None)?\]?", ast.unparse(type_))
        unit = next((units for kind, units in UNITS.items() if re.search(kind, name)), "")
        if is_number and not re.search(unit, public.docstring):
            yield f"has {name}, whose unit no docstring says"


SHAPE = re.compile(r"\[[\w\s,+*/().:-]+\]|\b(same|any) shape\b|\bscalar\b|\bragged (bool|u?int\d*|b?float\d*)\b")
ARRAY = re.compile(r"\b(ArrayLike|NDArray|ndarray|Tensor)\b")


def is_array(path: Path, type_: ast.expr) -> bool:
    """Whether a type is or holds an array, and not by the name of a type whose docstring has the shape."""
    found = [definition(path, each.id) for each in ast.walk(type_) if isinstance(each, ast.Name)]
    aliases = [each for each in found if each and isinstance(each.node, ast.Assign | ast.AnnAssign)]
    unsaid = [ast.unparse(each.node) for each in aliases if not SHAPE.search(text_of(each.below))]
    return any(map(ARRAY.search, [ast.unparse(type_), *unsaid]))


def check_shapes(public: Public) -> Iterator[str]:
    """A function that takes or returns arrays has their shape, and an attribute that is one."""
    arrays = [name for name, type_ in public.types().items() if is_array(public.path, type_)]
    if arrays and not SHAPE.search(public.docstring):
        yield f"has {', '.join(arrays)}, whose shape no docstring says"


def mistakes(public: Iterable[Public]) -> list[str]:
    found = ((each, check) for each in public for check in (check_errors, check_units, check_shapes))
    wrong = ((each, said) for each, check in found for said in check(each))
    return [f"{os.path.relpath(each.path, ROOT)}:{each.node.lineno}: {each.name} {said}" for each, said in wrong]


def test_the_docstrings_of_public_names_are_complete() -> None:
    public = [each for found in {*exported()} for each in members(found)]
    assert len(public) > 1300
    assert (wrong := sorted(mistakes(public))) == [], "\n".join(wrong)
