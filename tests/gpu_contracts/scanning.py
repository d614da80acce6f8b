"""What our code uses of other packages' interfaces, found in its syntax.

A use is a chain of names that begins at something foreign: what was imported from a package of `FOREIGN`, a parameter
or a field of type Any in a file that sees such a package, and whatever these give: `self._engine.model_config`, say,
where `self._engine` was made by vLLM. So a use that nobody has listed is found, and fails the test.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOREIGN: Final = (
    "flash_attn",
    "megatron",
    "sglang",
    "torch.cuda",
    "torch.distributed.distributed_c10d.ProcessGroupNCCL",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.fsdp",
    "torch.distributed.init_process_group",
    "torch.multiprocessing.reductions",
    "torch.nn.attention",
    "torch.version.cuda",
    "torch_memory_saver",
    "transformer_engine",
    "vllm",
)
"""Packages, and parts of torch, of which no line that uses a GPU is run by the tests of a machine without one."""
TYPED: Final = ("vllm", "sglang")
"""Those whose objects are Any here: what they give is followed."""
SKIPPED: Final = ("meshrl_megatron/cpu.py", "meshrl_sglang/standins/")
"""What Megatron's sources are rewritten by, and what stands for packages that are not there: neither calls any."""
OURS: Final = ("meshrl_sglang.scheduler.Processes",)
"""Classes of ours that are one of a followed package's."""
REMOTE: Final = "collective_rpc"
"""What calls a method of each of vLLM's workers, by its name."""


@dataclass(frozen=True)
class Given:
    """What a function is called with, or takes where one of ours overrides one of theirs."""

    positional: int
    keywords: tuple[str, ...]
    open: bool = False
    """Whether more may be given: `*arguments`, `**keywords`, or a partial call."""


@dataclass(frozen=True)
class Use:
    """One place where foreign things are used."""

    file: str
    line: int
    text: str
    """The chain: `self._engine.add_request`; of what was imported, its full name: `vllm.EngineArgs`."""
    given: Given | None
    """None where it is only named."""

    @property
    def key(self) -> str:
        """What the table lists it as: a full name, or the file and the chain."""
        return self.text if is_foreign(self.text) else f"{self.file.removeprefix('backends/')} {self.text}"


def files() -> Iterator[Path]:
    """The modules that may use a foreign package."""
    for folder in ("backends", "meshrl"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part in path.as_posix() for part in SKIPPED):
                yield path


def uses(source: str, file: str) -> list[Use]:
    """All of a module, each once a line."""
    tree = ast.parse(source)
    found = _Finder(tree, file)
    once = {(use.line, use.text, use.given): use for use in found.uses()}
    return sorted(once.values(), key=lambda use: (use.line, use.text))


def is_foreign(name: str, packages: tuple[str, ...] = FOREIGN) -> bool:
    """Whether a dotted name is of one of the packages."""
    return any(name == each or name.startswith(f"{each}.") for each in packages)


class _Finder:
    def __init__(self, tree: ast.Module, file: str) -> None:
        self._tree, self._file = tree, file
        self._names = _imports(tree)
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        sees = any(is_foreign(name, TYPED) for name in self._names.values())
        self._follows = sees or any(f"meshrl_{each}/" in file for each in TYPED)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self._heirs = {node.name for node in classes if self._inherits(node)}
        self._own = {each for node in classes if node.name in self._heirs for each in _set_by(node)}
        self._given: set[tuple[str, str]] = set()
        """Variables, and fields as `self.NAME`, that hold something foreign, each with its function or class."""
        if self._follows:
            before = -1
            while len(self._given) != before:
                before = len(self._given)
                self._follow()

    def uses(self) -> Iterator[Use]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                for name in _imported(node):
                    if is_foreign(name):
                        yield Use(self._file, node.lineno, name, None)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if is_foreign(node.value) and "." in node.value and node.value.replace(".", "").isidentifier():
                    yield Use(self._file, node.lineno, node.value, None)
            elif isinstance(node, ast.Attribute | ast.Name):
                yield from self._chained(node)
            elif isinstance(node, ast.Call) and self._follows:
                yield from self._by_name(node)
            elif isinstance(node, ast.FunctionDef) and self._overrides(node):
                given = Given(len(node.args.args) - 1, (), node.args.vararg is not None)
                yield Use(self._file, node.lineno, f"{self._parent_class(node)}.{node.name}", given)

    def _chained(self, node: ast.Attribute | ast.Name) -> Iterator[Use]:
        """A whole chain, and a name that is called."""
        parent = self._parents[node]
        given = _given(parent, node) if isinstance(parent, ast.Call) else None
        part = isinstance(parent, ast.Attribute) or (isinstance(node, ast.Name) and given is None)
        if not part and (text := self._chain(node)):
            yield Use(self._file, node.lineno, text, given)

    def _by_name(self, node: ast.Call) -> Iterator[Use]:
        """Attributes and methods that are named by a string."""
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and self._is_given(node.args[0]):
            yield Use(self._file, node.lineno, f"{self._text(node.args[0])}.{_word(node.args[1])}", None)
        if isinstance(node.func, ast.Attribute) and node.func.attr == REMOTE:
            (given,) = [each.value for each in node.keywords if each.arg == "kwargs"] or [ast.Dict([], [])]
            assert isinstance(given, ast.Dict)
            keywords = tuple(str(key.value) for key in given.keys if isinstance(key, ast.Constant))
            yield Use(self._file, node.lineno, f"{REMOTE}:{_word(node.args[0])}", Given(0, keywords))

    def _chain(self, node: ast.expr) -> str:
        """The text of a chain that begins at something foreign; empty of any other."""
        name = self._full(node)
        if name and (is_foreign(name) or name in OURS):
            return name
        if self._follows and isinstance(node, ast.Attribute) and self._is_given(node.value):
            return self._text(node)
        return ""

    def _full(self, node: ast.expr) -> str:
        """The dotted name of what was imported, also by `import_module("NAME")`; empty of anything else."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "") or self._narrowed(node)
        if isinstance(node, ast.Attribute) and (before := self._full(node.value)):
            return f"{before}.{node.attr}"
        match node:
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module))]):
                return module
            case ast.Call(func=ast.Name(id="cast"), args=[ast.Constant(value=str(kind)), _]):
                return self._names.get(kind, "")
            case _:
                return ""

    def _narrowed(self, node: ast.Name) -> str:
        """The foreign class that a variable is of: after a `cast`, and inside `if isinstance(variable, Class)`."""
        inner: ast.AST = node
        while inner in self._parents:
            outer = self._parents[inner]
            match outer:
                case ast.If(test=ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), ast.Name(id=kind)])):
                    full = self._names.get(kind, "")
                    if name == node.id and inner is not outer.test and is_foreign(full):
                        return full
                case ast.FunctionDef():
                    for each in ast.walk(outer):
                        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id:
                            kind = self._full(each.value) if isinstance(each.value, ast.Call) else ""
                            if is_foreign(kind):
                                return kind
                case _:
                    pass
            inner = outer
        return ""

    def _text(self, node: ast.expr) -> str:
        """As it is written, without what stands in brackets."""
        match node:
            case ast.Attribute():
                return f"{self._text(node.value)}.{node.attr}"
            case ast.Call():
                return f"{self._text(node.func)}()"
            case ast.Subscript():
                return f"{self._text(node.value)}[]"
            case ast.Await():
                return self._text(node.value)
            case _:
                return self._full(node) or ast.unparse(node)

    def _follow(self) -> None:
        for node in ast.walk(self._tree):
            match node:
                case ast.arg(annotation=ast.Name(id="Any")):
                    self._give(ast.Name(node.arg), self._function(node))
                case ast.AnnAssign(annotation=ast.Name(id="Any"), target=target):
                    in_class = isinstance(self._parents[node], ast.ClassDef)
                    assert isinstance(target, ast.Name | ast.Attribute)
                    name = f"self.{target.id}" if in_class and isinstance(target, ast.Name) else target
                    self._give(name, self._parent_class(node) if in_class else self._function(node))
                case ast.FunctionDef(returns=ast.Name(id="Any")) if self._parent_class(node):
                    self._give(f"self.{node.name}", self._parent_class(node))
                case ast.Assign(targets=targets, value=value) if self._is_given(value):
                    for target in targets:
                        self._give(target, self._function(node))
                case (
                    ast.For(target=target, iter=source)
                    | ast.AsyncFor(target=target, iter=source)
                    | ast.comprehension(target=target, iter=source)
                ) if self._is_given(source):
                    self._give(target, self._function(node))
                case _:
                    pass

    def _give(self, target: ast.expr | str, scope: str) -> None:
        match target:
            case str():
                self._given.add((scope, target))
            case ast.Tuple(elts=several) | ast.List(elts=several):
                for each in several:
                    self._give(each, scope)
            case ast.Name(id=name):
                self._given.add((scope, name))
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                self._given.add((scope.split(".", maxsplit=1)[0], f"self.{attribute}"))
            case _:
                pass

    def _is_given(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name) if is_foreign(self._names.get(name, ""), TYPED):
                return True
            case ast.Name(id=name):
                return any((scope, name) in self._given for scope in self._scopes(node))
            case ast.Call(func=ast.Name(id="super")):
                return self._parent_class(node) in self._heirs
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if self._holds(node, attribute):
                return True
            case _:
                return self._full(node) in OURS or any(self._is_given(each) for each in _through(node))

    def _holds(self, node: ast.expr, attribute: str) -> bool:
        """Whether a field of the object that a method is of is foreign: it was given so, or is inherited."""
        owner = self._parent_class(node)
        return (owner, f"self.{attribute}") in self._given or (owner in self._heirs and attribute not in self._own)

    def _scopes(self, node: ast.AST) -> Iterator[str]:
        """The functions that a node is in, the innermost first, and the module."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield self._qualified(node)
        yield ""

    def _function(self, node: ast.AST) -> str:
        return next(self._scopes(node))

    def _qualified(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        owner = self._parent_class(node)
        return f"{owner}.{node.name}.{node.lineno}" if owner else f"{node.name}.{node.lineno}"

    def _parent_class(self, node: ast.AST) -> str:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.ClassDef):
                return node.name
        return ""

    def _overrides(self, node: ast.FunctionDef) -> bool:
        """Whether it is a public method of a class whose base is a foreign one."""
        owner = self._parents[node]
        return isinstance(owner, ast.ClassDef) and node.name != "__init__" and owner.name in self._heirs

    def _inherits(self, node: ast.ClassDef) -> bool:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        return any(is_foreign(self._full(base), TYPED) for base in bases)


def _through(node: ast.expr) -> list[ast.expr]:
    """The expressions of which one that is foreign makes this one foreign."""
    match node:
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Await(value=value):
            return [value]
        case ast.Call(func=ast.Name(id="zip" | "getattr"), args=several) | ast.Tuple(elts=several):
            return several
        case ast.BoolOp(values=several) | ast.Call(func=ast.Attribute(attr="run_until_complete"), args=several):
            return several
        case ast.ListComp(elt=made) | ast.SetComp(elt=made) | ast.GeneratorExp(elt=made):
            return [made]
        case ast.Call(func=function):
            return [function]
        case _:
            return []


def _given(parent: ast.Call, node: ast.expr) -> Given | None:
    """What a call gives to the function `node`, also where it is `partial` of it; None where it is an argument."""
    arguments = parent.args
    partial = isinstance(parent.func, ast.Name) and parent.func.id == "partial"
    if partial and arguments and arguments[0] is node:
        arguments = arguments[1:]
    elif parent.func is not node:
        return None
    keywords = tuple(each.arg for each in parent.keywords if each.arg)
    starred = any(isinstance(each, ast.Starred) for each in arguments)
    more = partial or starred or any(each.arg is None for each in parent.keywords)
    return Given(sum(not isinstance(each, ast.Starred) for each in arguments), keywords, more)


def _word(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, str)
    return node.value


def _set_by(node: ast.ClassDef) -> set[str]:
    """The names that a class of ours gives to itself."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.attr)
    return names


def keys_of(source: str, function: str) -> set[str]:
    """The names that a function puts into the dictionary of keywords that it returns."""
    (found,) = (
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef) and each.name == function
    )
    keys = [key for each in ast.walk(found) if isinstance(each, ast.Dict) for key in each.keys]
    keys += [
        each.slice for each in ast.walk(found) if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store)
    ]
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def _imports(tree: ast.Module) -> dict[str, str]:
    """What each name that is imported stands for, wherever in the module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]
