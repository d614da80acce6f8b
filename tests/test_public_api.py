import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import meshrl
from tests.test_docstrings import Function, definition, names, text_of

DOOR = Path(str(meshrl.__file__)).with_suffix(".pyi")
ROOMS = {path.stem for path in DOOR.parent.iterdir() if path.suffix in ("", ".py") and not path.stem.startswith("_")}
PUBLIC: list[str] = sorted({*vars(meshrl)["__all__"]} - ROOMS)
FOUND = {name: definition(DOOR, name) for name in PUBLIC}
"""What defines each, behind the doors of the package and of a room."""


def test_type_checkers_and_people_see_the_same_names() -> None:
    typed = {name for name, found in names(DOOR).items() if isinstance(found, str) and len(found) > len("meshrl.")}
    assert typed == set(PUBLIC)
    assert set(PUBLIC) <= set(dir(meshrl))


@pytest.mark.process
def test_a_name_is_loaded_when_it_is_asked_for() -> None:
    code = (
        "import sys, meshrl; from meshrl import Mesh, endpoint\n"
        "assert not {'pydantic', 'structlog', 'meshrl.data', 'meshrl.run'} & set(sys.modules)\n"
        "from meshrl import AgentConfig, read_chat; import meshrl.run.check\n"
        "assert not {'openai', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "assert type(meshrl) is type(sys) and meshrl.Mesh is Mesh, 'an ordinary module'\n"
        "from meshrl import *\n"
        "assert all(globals()[name] is getattr(meshrl, name) for name in meshrl.__all__)\n"
        "assert not hasattr(meshrl, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_public_name_exists_and_says_what_it_is() -> None:
    doors = {name: importlib.import_module(str(names(DOOR)[name])) for name in PUBLIC}
    assert [name for name, door in doors.items() if getattr(meshrl, name) is not getattr(door, name)] == []
    said = {name: docstring(found.node) or text_of(found.below) for name, found in FOUND.items() if found}
    assert [name for name in PUBLIC if not said.get(name)] == []


def docstring(node: ast.stmt) -> str | None:
    return ast.get_docstring(node) if isinstance(node, ast.ClassDef | Function) else None


SIGNATURES = Path(__file__).with_name("public_signatures.txt")
"""Each public name, with what it takes and gives; `python tests/test_public_api.py` writes it anew, on purpose."""


def signatures() -> str:
    """Each public function, and each class with its fields and public methods, as the source has them."""
    found: list[str] = []
    for name, own in FOUND.items():
        node = own.node if own else None
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            found += [f"class {name}({bases})", *(f"    {line}" for part in node.body if (line := _line(part)))]
        else:
            found.append((_line(node) if isinstance(node, Function) else None) or name)
    return "\n".join(found) + "\n"


def _line(node: ast.stmt) -> str | None:
    if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        return ast.unparse(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if node.name.startswith("_") and node.name != "__init__":
            return None
        decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{decorators}{kind} {node.name}({ast.unparse(node.args)}){returns}"
    return None


def test_public_names_and_their_signatures_change_on_purpose() -> None:
    assert signatures().splitlines() == SIGNATURES.read_text("utf-8").splitlines()


if __name__ == "__main__":
    SIGNATURES.write_text(signatures(), "utf-8")
