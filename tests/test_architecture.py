"""The rooms of the house: imports go one way, as the tour says, no backend's library is loaded, files stay small."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.xdist_group("architecture")  # which reads each file once

BASE = ("errors", "config", "events", "http_server", "hub", "log", "supervisor", "tags", "user_code")
"""What every room may use, of which each may use the others."""

ROOMS = {
    "mesh": "",
    "observe": "",
    "data": "mesh",
    "engines": "mesh data",
    "algo": "data",
    "roles": "mesh data algo",
    "tasks": "mesh data roles",
    "remote": "mesh data algo roles",
    "overlap": "mesh data tasks roles",
    "agents": "mesh data tasks roles overlap",
    "run": "observe mesh data engines algo tasks roles overlap agents remote",
    "testing": "mesh data engines algo tasks roles overlap agents run",
    "planning": "mesh data engines algo tasks roles observe run testing",
    "tinker": "mesh data algo roles agents run remote",
    "cli": "engines tasks roles agents run observe planning tinker",
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


DOORS_OF_ALL = ("__init__", "__main__")
"""What `import meshrl` and `python -m meshrl` open: of no room."""
CORE = {name: path for name, path in modules("meshrl").items() if name not in DOORS_OF_ALL}
BACKENDS = modules("backends")
ALGORITHMS = modules("algorithms")
SOURCES = [
    path
    for folder in ("meshrl", "backends", "algorithms", "bench", "examples", "tests")
    for path in modules(folder).values()
]


class Source(NamedTuple):
    """What is in a file. The whole tree of each would fill the memory."""

    lines: int
    imports: list[str]
    """The dotted names that it imports, at any depth: of `from a import b` it is `a.b`."""
    loaded: list[str]
    """Those that it imports when it runs."""
    functions: list[tuple[str, int, int]]
    """The name, the first line and the number of lines of each."""


@cache
def read(path: Path) -> Source:
    text = path.read_text("utf-8")
    statements = [*walked(ast.parse(text))]
    typed = [
        each for each in statements if isinstance(each, ast.If) and getattr(each.test, "id", "") == "TYPE_CHECKING"
    ]
    unloaded = {inner for guard in typed for statement in guard.body for inner in walked(statement)}
    found = Source(len(text.splitlines()), [], [], [])
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            above = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            found.imports.extend(f"{above}{alias.name}" for alias in node.names)
            found.loaded.extend(f"{above}{alias.name}" for alias in node.names if node not in unloaded)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1))
    return found


def walked(above: ast.AST) -> Iterator[ast.AST]:
    """A statement and those below it, without their expressions, which are most of a tree."""
    yield above
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(above, part, ()):
            yield from walked(statement)


def words(path: Path) -> set[str]:
    """The identifiers and the texts of a file, but docstrings."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    docs = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docs]
    named = [node for node in nodes if not isinstance(node, ast.Constant | ast.alias)]
    values = [*texts, *(value for node in named for _, value in ast.iter_fields(node))]
    return {value for value in values if isinstance(value, str)}


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
    """What other rooms import a module's names from: its room, or a folder of it with a door of its own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if is_door(CORE[".".join(parts[:2])]) else parts[0]


@cache
def exports(door: Path) -> set[str]:
    """The names that a door imports as themselves, those that it defines, and those of its `__all__`."""
    tree = ast.parse(door.read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names = [each.id for each in targets if isinstance(each, ast.Name)]
            found.update(ast.literal_eval(node.value) if node.value and names == ["__all__"] else names)
    return found


def is_exported(name: str, room: str) -> bool:
    """Whether an imported name is one that a room exports, not one of its modules; a file exports all."""
    file = ROOT / f"meshrl/{room}.py"
    return file.is_file() or name.removeprefix(f"meshrl.{room}.") in exports(
        ROOT / f"meshrl/{room.replace('.', '/')}/__init__.py"
    )


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])


def is_door(path: Path) -> bool:
    return path.name == "__init__.py"


def listed(wrong: Collection[str]) -> str:
    return "\n".join(sorted(wrong))


def check_imports(modules: Mapping[str, Path], mistakes: Callable[[str, str], Iterator[str]]) -> None:
    """See each import of some modules, for which `mistakes(module, name)` says what is wrong with it."""
    wrong = [
        f"{module} imports {name}: {mistake}"
        for module, path in modules.items()
        for name in read(path).imports
        for mistake in mistakes(module, name)
    ]
    assert not wrong, listed(wrong)


def test_the_rooms_are_these_and_nothing_else_lies_in_the_house() -> None:
    assert {library(module) for module in CORE} == {*ROOMS, *BASE}
    assert sorted(path.stem for path in (ROOT / "meshrl").glob("*.py")) == sorted({*DOORS_OF_ALL, *BASE} - {"config"})
    assert read(ROOT / "meshrl/__main__.py").imports == ["meshrl.cli.main"]


def test_a_module_imports_from_the_rooms_that_its_own_may_use_by_their_doors() -> None:
    def mistakes(module: str, name: str) -> Iterator[str]:
        room, other = library(module), core_module(name)
        allowed = {*BASE, *ROOMS.get(room, "").split()}
        if name.startswith("."):
            yield "write imports in full"
        elif other == "__init__":
            yield "that is the package's front door"
        elif other is not None and library(other) != room:
            if library(other) not in allowed:
                yield f"{room} may use {sorted(allowed)}"
            if is_private(name):
                yield f"it is private to {library(other)}"
            elif not is_exported(name, door(other)):
                yield f"meshrl.{door(other)} does not export it"

    check_imports(CORE, mistakes)


def test_no_rooms_and_no_modules_of_a_room_import_each_other_in_a_circle() -> None:
    graphs: dict[str, dict[str, set[str]]] = {"rooms": {room: {*allowed.split()} for room, allowed in ROOMS.items()}}
    for module, path in CORE.items():
        if not is_door(path):
            others = {core_module(name) or "" for name in read(path).imports} - {module, "", "__init__"}
            room = "base" if library(module) in BASE else library(module)
            near = {each for each in others if library(each) in (BASE if room == "base" else (room,))}
            graphs.setdefault(room, {})[module] = {each for each in near if not is_door(CORE[each])}
    wrong: list[str] = []
    for graph in graphs.values():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            wrong.append(" imports from ".join(reversed(circle.args[1])))
    assert not wrong, listed(wrong)


def test_the_core_imports_no_library_of_a_backend() -> None:
    wrong: list[str] = []
    for module, path in CORE.items():
        own = {"ray"} if module.startswith("engines.ray") else set[str]()
        own |= {"torch"} if module == "engines.ray.link" else set()  # loaded when weights leave a machine (decision 23)
        loaded = {library(name) for name in read(path).loaded} & HEAVY
        as_types = ({library(name) for name in read(path).imports} & HEAVY) - loaded
        as_types -= {"torch"} if library(module) == "algo" else set()
        wrong += [f"meshrl.{module} imports {name}" for name in (loaded | as_types) - own]
    assert not wrong, listed(wrong)


SHARED = {"meshrl_torch": set[str](), "meshrl_inference": {"meshrl_torch"}}
"""What backends have in common, and what each of these may see of the others."""

DOORS = {f"meshrl_{name}" for name in ("inference", "sglang", "torch", "vllm")}
IN_ANOTHER_ENVIRONMENT = tuple(
    name for name in BACKENDS if name in DOORS or name.startswith(("meshrl_inference.engine_side", "meshrl_torch.wire"))
)
"""Modules that the process of an engine imports, where there is no meshrl."""


def test_a_backend_sees_the_core_itself_and_what_is_shared() -> None:
    def mistakes(module: str, name: str) -> Iterator[str]:
        seen = {library(module), "meshrl"} | SHARED.get(library(module), set(SHARED))
        if library(name) not in seen and library(name).startswith("meshrl"):
            yield f"it may see {sorted(seen)}"
        if library(core_module(name) or "") in ("cli", "run"):
            yield "that runs backends"
        if is_private(name):
            yield "it is private"
        elif (other := core_module(name)) and other != "__init__" and not is_exported(name, door(other)):
            yield f"meshrl.{door(other)} does not export it"
        apart = module in IN_ANOTHER_ENVIRONMENT and name.rpartition(".")[0] not in IN_ANOTHER_ENVIRONMENT
        if apart and library(name).startswith("meshrl"):
            yield "the process of an engine needs nothing of meshrl"

    check_imports(BACKENDS, mistakes)


def test_an_algorithm_is_one_page_on_the_public_names_and_nothing_imports_it() -> None:
    allowed = {"meshrl", "numpy", "torch"} | sys.stdlib_module_names
    wrong = [
        f"{module} imports {name}"
        for module, path in ALGORITHMS.items()
        for name in read(path).imports
        if library(name) not in allowed
    ]
    wrong += [f"{module} has more than 100 lines" for module, path in ALGORITHMS.items() if read(path).lines > 100]
    wrong += [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in read(path).imports
        if library(name) in {"algorithms", *ALGORITHMS}
    ]
    assert not wrong, listed(wrong)


def test_files_and_functions_are_small() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {read(path).lines} lines" for path in SOURCES if read(path).lines >= 600]
    wrong += [
        f"{path.relative_to(ROOT)}:{first}: {name} has {lines} lines"
        for path in SOURCES
        for name, first, lines in read(path).functions
        if lines >= 60
    ]
    assert not wrong, listed(wrong)


WORDS = re.compile("fsdp|megatron|sglang|vllm", re.IGNORECASE)
"""Backends whose names mean nothing else, but that an error tells of the program `vllm serve`."""


def test_the_core_names_no_backend() -> None:
    found = [(module, word) for module, path in CORE.items() for word in words(path)]
    wrong = [f"meshrl.{module}: {word!r}" for module, word in found if WORDS.search(word.replace("`vllm serve ", ""))]
    assert not wrong, listed(wrong)


def loaded(libraries: Collection[str], by: str) -> list[str]:
    code = f"import sys; {by}; print(*(set(sys.modules) & {set(libraries)}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.process
def test_libraries_are_loaded_where_they_are_needed_alone() -> None:
    assert loaded(HEAVY, by="from meshrl import PolicyConfig; PolicyConfig.open_tables()") == []
    assert loaded({"pydantic", "ray", "structlog"}, by="import meshrl.engines.processes.template") == []


HOUSE = run_path(str(ROOT / "docs" / "house.py"))


def test_the_tour_has_the_rooms_as_their_docstrings_say_and_the_picture_their_imports() -> None:
    assert HOUSE["written"]() == HOUSE["PAGE"].read_text("utf-8"), "run python docs/house.py"
    assert HOUSE["picture"]() == HOUSE["PICTURE"].read_text("utf-8"), "run python docs/house.py"


def test_a_room_lies_above_all_that_it_imports_from() -> None:
    level = {room: number for number, rooms in enumerate(HOUSE["ROOMS"]) for room in rooms}
    assert level.keys() == {*ROOMS, "config"}
    for room, allowed in ROOMS.items():
        assert all(level[other] < level[room] for other in allowed.split()), room
