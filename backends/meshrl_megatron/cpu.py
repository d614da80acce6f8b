"""Megatron-Core without a GPU: its CUDA calls are rewritten to CPU forms at its import.

Megatron-Core uses CUDA by name, without an option to avoid it: `torch.cuda.current_device()`, `device="cuda"`,
`.cuda()`, `param.type() == 'torch.cuda.FloatTensor'`, pinned memory. Nothing is rewritten if torch has a GPU, and never
outside `megatron.core`. A use of CUDA that no rule below covers raises when its module is imported.
"""

import ast
import contextlib
import marshal
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, TypeVar, cast

import torch

from meshrl.errors import BackendError

PACKAGE: Final = "megatron.core"
_TRIES: Final = 8
"""Attempts to parse a source."""
_RULES: Final = source_hash(Path(__file__).read_bytes())
"""Hash of all rules below. Code from other rules is not used."""

_FORMS: Final = {
    "current_device": "(lambda: 'cpu')",
    "synchronize": "(lambda *_: None)",
    "empty_cache": "(lambda: None)",
    "get_rng_state": "(lambda *_: torch.get_rng_state())",
    "set_rng_state": "(lambda state, *_: torch.set_rng_state(state))",
    "manual_seed": "torch.manual_seed",
    "Stream": "torch.cpu.Stream",
    "current_stream": "torch.cpu.current_stream",
    "FloatTensor": "torch.FloatTensor",
    "HalfTensor": "torch.HalfTensor",
    "BFloat16Tensor": "torch.BFloat16Tensor",
}
"""The CPU form of `torch.cuda.NAME`."""

_BODIES: Final = {
    "_get_cuda_rng_state": "return torch.get_rng_state()",
    "_set_cuda_rng_state": "torch.set_rng_state(new_state)",
    "_maybe_dtoh_and_synchronize": """
if point == self.cuda_dtoh_point:
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if torch.is_tensor(getattr(self, name)):
            setattr(self, name, getattr(self, name).numpy())
return tokens_per_expert
""",
}
"""Functions of Megatron-Core with other bodies. Recomputed layers save and restore the only generator, and the routing
of tokens to experts need not be copied to the host."""

_LEFT: Final = {
    *("CUDAGraph", "CUDAPluggableAllocator", "MemPool", "graph", "graph_pool_handle", "use_mem_pool"),
    *("Event", "default_stream", "set_stream", "stream"),
    *("clock_rate", "get_device_capability", "get_device_properties", "memory_allocated", "memory_reserved"),
    *("device_memory_used", "memory_snapshot", "memory_stats", "nvtx", "power_draw", "temperature", "utilization"),
    *("_sleep", "cudart", "is_current_stream_capturing", "is_initialized", "profiler"),
    *("amp", "device", "device_count", "is_available", "set_device", "OutOfMemoryError"),
    *("_lazy_call", "_lazy_init", "default_generators", "random"),
}
"""Parts of `torch.cuda` that stay as they are: no path on a CPU reaches them, and torch itself raises if one does."""

NodeT = TypeVar("NodeT", bound=ast.AST)


def is_installed() -> bool:
    """True if `megatron.core` has its CPU form in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Rewrite `megatron.core` at its import, if torch has no GPU. Later calls have no effect.

    Raises BackendError if it is imported already, because it cannot run here as it is.
    """
    if torch.cuda.is_available() or is_installed():
        return
    if PACKAGE in sys.modules:
        raise BackendError(
            f"{PACKAGE} was imported before meshrl_megatron.core, and torch has no GPU here: without one it must be "
            "imported by that module, which gives its CUDA calls their CPU forms: import meshrl_megatron.core first"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds only the modules of Megatron-Core."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a module from its rewritten source, and caches the code next to Python's own cache."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        if b"cuda" not in source and b"pin_memory" not in source:
            return super().get_code(fullname)
        key = MAGIC_NUMBER + source_hash(source) + _RULES
        cached = cache_from_source(self.path, optimization="meshrl")
        with contextlib.suppress(OSError):
            data = self.get_data(cached)
            if data.startswith(key):
                return cast("CodeType", marshal.loads(data[len(key) :]))  # noqa: S302 -- as Python reads its own
        code = compile(rewritten(_parsed(source), fullname), self.path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            self.set_data(cached, key + marshal.dumps(code))  # completely or not at all, and not in a read-only place
        return code


def _parsed(source: bytes) -> ast.Module:
    """Parse a source. Retries if another thread parsed too, because CPython 3.11 counts their depths together."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def rewritten(module: ast.Module, name: str) -> ast.Module:
    """Rewrite a module of Megatron-Core to its CPU form, in place. Each node keeps its line.

    Raises BackendError for a use of CUDA without a CPU form here.
    """
    _Rewriter(name).visit(module)
    return ast.fix_missing_locations(module)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._module = module

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in _BODIES:
            node.body = [_at(statement, node) for statement in ast.parse(_BODIES[node.name]).body]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # a docstring

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        text = "cpu" if node.value == "cuda" else node.value
        for kind in ("Float", "Half", "BFloat16"):
            text = text.replace(f"torch.cuda.{kind}Tensor", f"torch.{kind}Tensor")
        if "torch.cuda." in text and "Tensor" in text:
            raise self._unknown(node)
        return _at(ast.Constant(text), node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "pin_memory":
            node.value = _at(ast.Constant(False), node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "pin_memory"):
            node.func.attr, node.args, node.keywords = "cpu", [], []
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is(node.value, "torch", "cuda"):
            if node.attr in _FORMS:
                return _at(ast.parse(_FORMS[node.attr], mode="eval").body, node)
            if node.attr not in _LEFT:
                raise self._unknown(node)
            return node
        if node.attr == "cuda" and not any(_is(node, "torch", owner, "cuda") for owner in ("backends", "version")):
            raise self._unknown(node)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        parts, names = (node.module or "").split("."), {alias.name for alias in node.names}
        if parts[:2] == ["torch", "cuda"] and not (names <= _LEFT or _LEFT.intersection(parts[2:])):
            raise self._unknown(node)
        return node

    def _unknown(self, node: ast.expr | ast.stmt) -> BackendError:
        return BackendError(
            f"{self._module}, line {node.lineno}: `{ast.unparse(node)}` has no CPU form in meshrl_megatron.cpu, and "
            "torch has no GPU here: take the megatron-core that meshrl[megatron] names, or a machine with a GPU"
        )


def _is(node: ast.expr, *names: str) -> bool:
    """True if a node is these names as attributes, such as `torch.cuda`."""
    if len(names) == 1:
        return isinstance(node, ast.Name) and node.id == names[0]
    return isinstance(node, ast.Attribute) and node.attr == names[-1] and _is(node.value, *names[:-1])


def _at(new: NodeT, old: ast.AST) -> NodeT:
    """Give a new node the place of an old one."""
    for node in ast.walk(new):
        ast.copy_location(node, old)
    return new
