"""The reference of the Python API: a page for each room, with what its door gives, from the docstrings."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import griffe

import meshrl

INDEX = "reference/api/index.md"
_ALSO = ("errors",)
"""Modules of the base with names that users catch or call."""
_WITHOUT = {"cli"}
"""The command line has a reference of its own."""


def pages() -> dict[str, str]:
    """The text of each page, by its path in the site."""
    found = {INDEX: _index()}
    for room in rooms():
        names = _names(room)
        found[page_of(room)] = (
            f"# meshrl.{room}\n\n{inspect.getdoc(importlib.import_module(f'meshrl.{room}'))}\n\n"
            + "".join(f"::: {name}\n\n" for name in names)
        )
    return found


def rooms() -> list[str]:
    """The rooms that have a page."""
    found = [module.name for module in pkgutil.iter_modules(meshrl.__path__) if module.ispkg]
    return sorted([*({*found} - _WITHOUT), *_ALSO])


def page_of(room: str) -> str:
    """Where a room's page is."""
    return f"reference/api/{room}.md"


def _names(room: str) -> list[str]:
    """What a room's door gives, and what of the doors below it is public."""
    loaded = importlib.import_module(f"meshrl.{room}")
    source = ast.parse(Path(str(loaded.__file__)).read_text("utf-8"))
    imports = [alias for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for alias in node.names]
    given: list[str] = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == loaded.__name__
    ]
    given = [*given, *(alias.name for alias in imports if alias.asname == alias.name)]
    below = [f"{door}.{name}" for name, door in _DOORS.items() if door.startswith(f"meshrl.{room}.")]
    return sorted([*(f"meshrl.{room}.{name}" for name in given), *below], key=str.lower)


def _index() -> str:
    rows: list[str] = []
    for name in sorted(_DOORS, key=str.lower):
        value = getattr(meshrl, name)
        place = _DOORS[name]
        said = (inspect.getdoc(value) or _written(place, name)).partition("\n\n")[0]
        said = said.replace("\n", " ").replace("|", "\\|")
        rows.append(f"| [`{name}`]({place.split('.')[1]}.md#{place}.{name}) | {said} |")
    return (
        "# Python API\n\nLook up a name of `import meshrl as rl`. Each room has a page, which also has the names that\n"
        "only backends and extensions need.\n\n| Name | What it is |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def _written(module: str, name: str) -> str:
    """What the source says below an assignment: a value such as `DP` has no docstring at run time."""
    docstring = griffe.load(module, search_paths=[Path(meshrl.__file__).parents[1]])[name].docstring
    return docstring.value if docstring else ""


def _public() -> dict[str, str]:
    """The public names, and the module of each."""
    stub = ast.parse(Path(meshrl.__file__).with_suffix(".pyi").read_text("utf-8"))
    found = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: f"meshrl.{node.module}" for node in found for alias in node.names}


_DOORS = _public()
