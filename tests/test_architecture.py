"""The rooms of the house: imports go one way, the core loads no backend's library, files and functions stay small."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from meshrl.roles import backends

ROOT = Path(__file__).parents[1]

BASE = ("errors", "config", "events", "log", "user_code")
"""What every room may use, of which each may use the others."""

ROOMS = {
    "deprecated": "data objectives roles tasks",
    "hub": "",
    "mesh": "",
    "report": "",
    "trackers": "report",
    "data": "mesh",
    "engines": "mesh data",
    "weights": "mesh data",
    "losses": "data",
    "objectives": "data",
    "tasks": "hub data roles",
    "roles": "hub mesh data weights losses objectives",
    "rewards": "data tasks roles",
    "rollout": "mesh data weights tasks roles",
    "agents": "mesh data weights tasks roles rewards rollout",
    "environments": "mesh data weights tasks roles rewards",
    "run": "hub trackers mesh data engines losses tasks roles rewards rollout agents environments",
    "evaluation": "mesh data engines tasks roles rewards rollout run",
    "simulation": "mesh data engines weights losses objectives roles run report",
    "planning": "tasks rewards roles run simulation",
    "testing": (
        "deprecated mesh data engines weights losses objectives tasks roles rewards rollout agents run evaluation "
        "simulation"
    ),
    "launch": "roles run",
    "watch": "report run",
    "cli": "engines tasks roles agents run report evaluation simulation planning launch watch",
}
"""Each room and those that it may import from, by their doors: no other, and none of these in a circle."""

HEAVY = {"torch", "transformers", "ray", "sglang", "vllm", "megatron"}
"""Libraries of backends and engines: they may not be imported by the core."""


def modules(folder: str) -> dict[str, Path]:
    """Each module below a folder by its dotted name, `engines.local`; a package is named by its folder."""
    root = ROOT / folder
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(root.rglob("*.py"))
    }


CORE = {name: path for name, path in modules("meshrl").items() if name != "__init__"}
SOURCES = [
    path
    for folder in ("meshrl", "backends", "algorithms", "bench", "examples", "tests")
    for path in modules(folder).values()
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
    """The module of the core that an import reaches: `meshrl.mesh.scatter.take` is `mesh.scatter`."""
    if library(name) != "meshrl":
        return None
    parts = name.split(".")[1:]
    longest = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((module for module in longest if module in CORE), "__init__")


def door(module: str) -> str:
    """What other rooms import a module's names from: its room, or one of several engines."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "engines" else parts[0]


def is_exported(name: str, room: str) -> bool:
    """Whether an imported name is in the `__all__` of a room, not one of its modules; a file exports all."""
    return (ROOT / f"meshrl/{room}.py").is_file() or name.removeprefix(f"meshrl.{room}.") in importlib.import_module(
        f"meshrl.{room}"
    ).__all__


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])


def test_the_rooms_are_these_and_nothing_else_lies_in_the_house() -> None:
    assert {library(module) for module in CORE} == {*ROOMS, *BASE}
    assert sorted(path.stem for path in (ROOT / "meshrl").glob("*.py")) == sorted({"__init__", *BASE} - {"config"})


def test_the_rooms_are_in_one_order() -> None:
    TopologicalSorter({room: allowed.split() for room, allowed in ROOMS.items()}).prepare()


@pytest.mark.parametrize("module", sorted(CORE))
def test_a_module_imports_from_the_rooms_that_its_own_may_use_by_their_doors(module: str) -> None:
    room = library(module)
    allowed = {*BASE, *ROOMS.get(room, "").split()}
    for name in imports(CORE[module]):
        assert not name.startswith("."), f"meshrl.{module} imports {name}: write imports in full"
        other = core_module(name)
        if other is None or library(other) == room:
            continue
        assert other != "__init__", f"meshrl.{module} imports {name} from the package's front door"
        assert library(other) in allowed, f"meshrl.{module} imports {name}: {room} may use {sorted(allowed)}"
        assert not is_private(name), f"meshrl.{module} imports {name}, which is private to {library(other)}"
        assert is_exported(name, door(other)), (
            f"meshrl.{module} imports {name}, which meshrl.{door(other)} does not export"
        )


@pytest.mark.parametrize("room", sorted((*ROOMS, "base")))
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    inside = [module for module in CORE if library(module) in (BASE if room == "base" else (room,))]
    graph = {
        module: {
            other
            for name in imports(CORE[module])
            if (other := core_module(name)) in inside and other != module and not is_door(CORE[other])
        }
        for module in inside
        if not is_door(CORE[module])
    }
    TopologicalSorter(graph).prepare()


def is_door(path: Path) -> bool:
    return path.name == "__init__.py"


@pytest.mark.parametrize("room", sorted({*ROOMS, "config"}))
def test_a_room_says_what_it_is_for_and_what_it_exports(room: str) -> None:
    tree = ast.parse((ROOT / "meshrl" / room / "__init__.py").read_text("utf-8"))
    assert ast.get_docstring(tree)
    exported = importlib.import_module(f"meshrl.{room}")
    for name in exported.__all__:
        assert hasattr(exported, name), f"meshrl.{room}.{name}"


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_core_imports_no_library_of_a_backend(module: str) -> None:
    own = {"ray"} if module.startswith("engines.ray") else set()
    own |= {"torch"} if module == "engines.ray.link" else set()  # loaded when weights leave a machine (decision 23)
    found = {library(name) for name in imports(CORE[module], run_time_only=True)} & HEAVY
    assert found <= own
    as_types = {library(name) for name in imports(CORE[module])} & HEAVY
    assert as_types - found <= own | ({"torch"} if library(module) == "losses" else set())


SHARED = {"meshrl_hf": set[str](), "meshrl_inference": {"meshrl_hf"}}
"""What backends have in common, no backends themselves, and what each may see of the others."""

IN_ANOTHER_ENVIRONMENT = (
    *(
        f"meshrl_inference.{name}"
        for name in ("worker", "engine", "arrival", "assembly", "mapped", "messages", "naming", "tensors")
    ),
    *(f"meshrl_hf.{name}" for name in ("collective", "fingerprints", "fp8", "handover", "offer", "reach", "reading")),
)
"""Modules that the process of an engine imports, where there is no meshrl."""


@pytest.mark.parametrize("module", sorted(modules("backends")))
def test_a_backend_sees_the_core_itself_and_what_is_shared(module: str) -> None:
    path = modules("backends")[module]
    seen = {library(module), "meshrl"} | SHARED.get(library(module), set(SHARED))
    for name in imports(path):
        assert library(name) in seen or not library(name).startswith("meshrl"), name
        assert library(core_module(name) or "") not in ("cli", "run"), name
        assert not is_private(name), f"{path.name}: {name} is private"
        if (other := core_module(name)) and other != "__init__":
            assert is_exported(name, door(other)), f"{path.name}: meshrl.{door(other)} does not export {name}"


@pytest.mark.parametrize("module", IN_ANOTHER_ENVIRONMENT)
def test_the_process_of_an_engine_needs_nothing_of_meshrl(module: str) -> None:
    for name in imports(modules("backends")[module]):
        assert not library(name).startswith("meshrl") or name.rpartition(".")[0] in IN_ANOTHER_ENVIRONMENT, name


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


WORDS = re.compile("fsdp|megatron|sglang|vllm", re.IGNORECASE)
"""Backends whose names mean nothing else, but that an error tells of the program `vllm serve`."""

NAMED = {
    "engines.ray.versions": {"torch"},  # the package, of which all nodes have one version
    "engines.ray.relay": {"torch"},  # the library, which may not be installed
    "roles.config": {"torch"},  # a default value: who gives no backend has this one
    "rewards.function": {"function"},  # a default value; and the key of the table
    "agents.chat": {"function"},  # a word of the format in which models are offered tools
    "agents.speller": {"function"},  # the same
    "agents.responses": {"function"},  # the same
    "agents.tool_calls": {"function"},  # the same
    "testing.scripted": {"function"},  # the same
    "environments.environment": {"function"},  # a default value
    "run.train": {"function"},  # the key of a reward's table
    "run.push": {"function"},  # the same
    "simulation.forecast": {"sim"},  # the room's own backend
    "testing.conformance.subject": {"torch"},  # the backend that the kit compares others with
}
"""Where a name of a backend may stand."""


def words(path: Path) -> Iterator[str]:
    """Each text of a module but its docstrings, and each identifier."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node.value
        elif not isinstance(node, ast.Constant | ast.alias):
            yield from (value for _, value in ast.iter_fields(node) if isinstance(value, str))


@pytest.mark.parametrize("module", sorted(CORE.keys() - {"deprecated"}))
def test_the_core_names_no_backend(module: str) -> None:
    quoted = {
        node.value
        for node in ast.walk(ast.parse(CORE[module].read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert quoted & backends().keys() <= NAMED.get(module, set())
    assert [word for word in words(CORE[module]) if WORDS.search(word.replace("`vllm serve ", ""))] == []


def loaded(libraries: Collection[str], by: str) -> list[str]:
    """Which of these libraries are imported after some code."""
    code = f"import sys; {by}; print(*(set(sys.modules) & {set(libraries)}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_options_of_backends_load_no_library_of_theirs() -> None:
    assert loaded(HEAVY, by="from meshrl import PolicyConfig; PolicyConfig.open_tables()") == []


def test_importing_meshrl_loads_no_library_of_a_backend() -> None:
    assert loaded(HEAVY, by="import meshrl") == []


def test_a_process_that_forks_ranks_loads_no_library_of_configurations_or_of_logs() -> None:
    """They would take about as long to import as all else that ranks without a model need."""
    assert loaded({"pydantic", "ray", "structlog"}, by="import meshrl.engines.processes.template") == []
