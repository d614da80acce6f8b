"""The rooms of the house: imports go one way, the core loads no backend's library, files and functions stay small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    {"errors", "sharding", "actor", "held", "events", "log", "report", "report.intervals", "sandboxed"},
    {
        "ledger",
        "position",
        "changes",
        "beside",
        "config",
        "imports",
        "rows",
        "ragged",
        "contract",
        "engines.loop",
        "progress",
        "engines.turns",
        "losses.kl",
        "report.analysis",
        "engines.ray.pickle",
        "shared_memory",
        "verifiers",
    },
    {
        "bucket",
        "columns",
        "layout",
        "metrics",
        "engine",
        "advantages",
        "estimates",
        "scripts",
        "engines.ray.wire",
        "losses.normalise",
        "sandbox",
    },
    {
        "weights",
        "remote",
        "role_config",
        "observation",
        "engines.threads",
        "engines.ray.cluster",
        "engines.ray.order",
        "engines.ray.process",
        "losses.loss",
        "losses.correction",
        "report.lanes",
        "report.reading",
        "report.trace",
    },
    {
        "delta",
        "table",
        "handle",
        "engines.local",
        "engines.ray.rank",
        "engines.ray.caller",
        "losses.likelihood",
        "losses.reinforce",
        "losses.sequence",
        "losses.preference",
        "losses.reward",
        "losses.sources",
        "losses.distillation",
        "losses.surrogate",
        "losses.value",
        "report.content",
    },
    {"data", "losses", "engines.ray.reservation", "report.page"},
    {
        "assembly",
        "calls",
        "prompts",
        "roles",
        "mesh",
        "tasks",
        "minibatches",
        "reference_kl",
        "critic",
        "engines.ray.engine",
    },
    {"balance", "preferences", "schedule", "registry", "rewards", "recorder", "checkpoints", "teacher", "engines.ray"},
    {"run", "generation", "environment", "serve", "scores"},
    {"stream", "check", "episodes"},
    {"rollout"},
    {"judging"},
    {"evaluation", "testing"},
    {"cli"},
)
"""A module imports from strictly lower layers only. `meshrl/__init__.py` stands above all of them."""

HEAVY = {"torch", "transformers", "ray", "vllm", "megatron"}
"""Libraries of backends and engines: they may not be imported by the core."""


def modules(folder: str) -> dict[str, Path]:
    """Each module below a folder by its dotted name, `engines.local`; a package is named by its folder."""
    root = ROOT / folder
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(root.rglob("*.py"))
    }


CORE = {name: path for name, path in modules("meshrl").items() if name not in ("__init__", "engines")}
SOURCES = [
    path for folder in ("meshrl", "backends", "algorithms", "bench", "tests") for path in modules(folder).values()
]


def imports(path: Path, *, run_time_only: bool = False) -> Iterator[str]:
    """The dotted names that a file imports, at any depth: of `from a import b` it gives `a.b`."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if run_time_only and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def library(name: str) -> str:
    return name.partition(".")[0]


def core_module(name: str) -> str | None:
    """The module of the core that an import reaches: `meshrl.rows.make_plan` is `rows`."""
    if library(name) != "meshrl":
        return None
    parts = name.split(".")[1:]
    longest = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((module for module in longest if module in CORE), "__init__")


def layer(module: str) -> int:
    room = "testing" if library(module) == "testing" else module
    found = [level for level, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"meshrl.{module} is in no layer: add it to LAYERS, as low as its imports allow"
    return found[0]


@pytest.mark.parametrize("module", sorted(CORE))
def test_a_module_of_the_core_imports_from_lower_layers_only(module: str) -> None:
    own = layer(module)
    for name in imports(CORE[module]):
        assert not name.startswith("."), f"meshrl.{module} imports {name}: write imports in full"
        other = core_module(name)
        if other is None or (library(module) == library(other) == "testing"):
            continue
        assert other != "__init__", f"meshrl.{module} imports {name} from the package's front door"
        assert layer(other) < own, f"meshrl.{module} (L{own}) imports meshrl.{other} (L{layer(other)})"


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_core_imports_no_library_of_a_backend(module: str) -> None:
    found = {library(name) for name in imports(CORE[module], run_time_only=True)} & HEAVY
    assert found <= ({"ray"} if module.startswith("engines.ray") else set())
    as_types = {library(name) for name in imports(CORE[module])} & HEAVY
    assert as_types - found <= ({"torch"} if library(module) == "losses" else set())


SHARED = "meshrl_hf"
"""What backends have in common: no backend itself."""


@pytest.mark.parametrize("module", sorted(modules("backends")))
def test_a_backend_sees_the_core_itself_and_what_is_shared(module: str) -> None:
    path = modules("backends")[module]
    seen = {library(module), "meshrl"} | ({SHARED} if library(module) != SHARED else set())
    for name in imports(path):
        assert library(name) in seen or not library(name).startswith("meshrl"), name
        assert core_module(name) not in ("cli", "run", "recorder"), name
        assert not any(part.startswith("_") for part in name.split(".")[1:]), f"{path.name}: {name} is private"


@pytest.mark.parametrize("module", sorted(modules("algorithms")))
def test_an_algorithm_is_one_page_on_the_public_names(module: str) -> None:
    path = modules("algorithms")[module]
    allowed = {"meshrl", "numpy", "torch"} | sys.stdlib_module_names
    assert {library(name) for name in imports(path)} <= allowed
    assert len(path.read_text("utf-8").splitlines()) <= 100


def test_nothing_imports_an_algorithm() -> None:
    names = {library(name) for path in SOURCES for name in imports(path)}
    assert not names & {"algorithms", *modules("algorithms")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    source = path.read_text("utf-8")
    assert len(source.splitlines()) < 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < 60, f"{node.name} in line {node.lineno} has {lines} lines"


def test_importing_meshrl_loads_no_library_of_a_backend() -> None:
    code = f"import sys, meshrl; print(*(set(sys.modules) & {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
