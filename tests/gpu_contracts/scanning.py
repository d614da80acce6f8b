"""What our code uses of other packages' interfaces, found in its syntax.

A use is a chain of names that begins at something foreign: what was imported from a package of `FOREIGN`, or a variable
or field that `table.toml` has for its file: `self._engine.model_config`, say, where `self._engine` was made by vLLM.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_TABLE: Final = tomllib.loads((Path(__file__).parent / "table.toml").read_text("utf-8"))
OBJECTS: Final[Mapping[str, str]] = _TABLE["objects"]
NOT_THEIRS: Final[Mapping[str, str]] = _TABLE["not_theirs"]
TRANSFORMER_ENGINE: Final[Sequence[str]] = _TABLE["transformer_engine"]
FOREIGN: Final = (
    "flash_attn", "megatron", "sglang", "torch.cuda", "torch.distributed.distributed_c10d.ProcessGroupNCCL",
    "torch.distributed.distributed_c10d._abort_process_group", "torch.distributed.fsdp",
    "torch.distributed.init_process_group", "torch.multiprocessing.reductions", "torch.nn.attention",
    "torch.version.cuda", "torch_memory_saver", "transformer_engine", "vllm",
)  # fmt: skip
"""Packages, and parts of torch, of which no line that uses a GPU is run by the tests of a machine without one."""
SKIPPED: Final = ("meshrl_megatron/cpu.py", "meshrl_sglang/standins/")
"""What Megatron's sources are rewritten by, and what stands for packages that are not there: neither calls any."""
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


def listed(key: str) -> str | None:
    """The entry of the table that a use comes under: the longest."""
    parts = key.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in OBJECTS or name in NOT_THEIRS), None)


def files() -> Iterator[Path]:
    """The modules that may use a foreign package."""
    for folder in ("backends", "meshrl"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part in path.as_posix() for part in SKIPPED):
                yield path


@cache
def found() -> tuple[Use, ...]:
    """Every use in the code."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files()}
    may_use = [name.rpartition(".")[2] for name in FOREIGN]
    return tuple(
        use
        for file, source in sources.items()
        if any(name in file or name in source for name in may_use)
        for use in uses(source, file)
    )


def uses(source: str, file: str) -> Iterator[Use]:
    """All of a module."""
    return _Finder(ast.parse(source), file).uses()


def is_foreign(name: str) -> bool:
    """Whether a dotted name is of one of the packages."""
    return any(name == each or name.startswith(f"{each}.") for each in FOREIGN)


class _Finder:
    def __init__(self, tree: ast.Module, file: str) -> None:
        self._tree, self._file = tree, file
        self._names = _imports(tree)
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def uses(self) -> Iterator[Use]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                yield from (self._use(node, name) for name in _imported(node) if is_foreign(name))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if is_foreign(node.value) and "." in node.value and node.value.replace(".", "").isidentifier():
                    yield self._use(node, node.value)
            elif isinstance(node, ast.Attribute | ast.Name):
                yield from self._chained(node)
            elif isinstance(node, ast.Call):
                yield from self._by_name(node)
            elif isinstance(node, ast.ClassDef) and self._is_known(node.name):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name != "__init__":
                        given = Given(len(each.args.args) - 1, (), each.args.vararg is not None)
                        yield self._use(each, f"{node.name}.{each.name}", given)

    def _use(self, node: ast.expr | ast.stmt, text: str, given: Given | None = None) -> Use:
        return Use(self._file, node.lineno, text, given)

    def _chained(self, node: ast.Attribute | ast.Name) -> Iterator[Use]:
        """A whole chain, and a name that is called."""
        parent, text = self._parents[node], self._text(node)
        given = _given(parent, node) if isinstance(parent, ast.Call) else None
        whole = not isinstance(parent, ast.Attribute) and (isinstance(node, ast.Attribute) or given is not None)
        if whole and "()" not in text.removeprefix("super()") and self._is_known(text):
            yield self._use(node, text, given)

    def _is_known(self, text: str) -> bool:
        return is_foreign(text) or listed(Use(self._file, 0, text, None).key) is not None

    def _by_name(self, node: ast.Call) -> Iterator[Use]:
        """Attributes and methods that are named by a string."""
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            text = f"{self._text(node.args[0])}.{getattr(node.args[1], 'value', '...')}"
            yield from [self._use(node, text)] * self._is_known(text)
        if isinstance(node.func, ast.Attribute) and node.func.attr == REMOTE:
            (given,) = [each.value for each in node.keywords if each.arg == "kwargs"] or [ast.Dict([], [])]
            assert isinstance(given, ast.Dict)
            keywords = tuple(str(key.value) for key in given.keys if isinstance(key, ast.Constant))
            yield self._use(node, f"{REMOTE}.{getattr(node.args[0], 'value', '...')}", Given(0, keywords))

    def _text(self, node: ast.expr) -> str:
        """As it is written, without what stands in brackets, and with the full name of what was imported."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, name)
            case ast.Attribute():
                return f"{self._text(node.value)}.{node.attr}"
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module))]):
                return module
            case ast.Call(func=ast.Name(id="cast"), args=[ast.Constant(value=str(kind)), _]):
                return self._names.get(kind, kind)
            case ast.Call():
                return f"{self._text(node.func)}()"
            case ast.Subscript():
                return f"{self._text(node.value)}[]"
            case _:
                return ast.unparse(node)


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


def keys_of(source: str, function: str) -> set[str]:
    """The names that a function puts into the dictionary of keywords that it returns."""
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    (found,) = (each for each in functions if each.name == function)
    keys: list[ast.expr | None] = []
    for each in ast.walk(found):
        if isinstance(each, ast.Dict):
            keys += each.keys
        elif isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            keys.append(each.slice)
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def _imports(tree: ast.Module) -> dict[str, str]:
    """What each name that is imported stands for, wherever in the module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]
