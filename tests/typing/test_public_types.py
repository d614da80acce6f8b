"""Each public name has a known type and a docstring, so that an editor and the site can show both."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import meshrl

ROOT = Path(__file__).parents[2]
DOORS: dict[str, str] = vars(meshrl)["_DOORS"]
"""Each public name, and where it comes from."""


@pytest.mark.timeout(300)
def test_all_public_types_are_known_and_documented() -> None:
    """As `pyright --verifytypes` counts: what is not private, and what that refers to, in each module."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "meshrl"]
    path = [str(ROOT), str(ROOT / "backends"), sysconfig.get_paths()["purelib"]]
    done = subprocess.run(
        [*command, "--ignoreexternal", "--outputjson"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )
    told = json.loads(done.stdout)["typeCompleteness"]
    public = [symbol for symbol in told["symbols"] if symbol["isExported"]]
    assert len(public) > 3000, done.stdout[:1000]
    wrong = [f"{each['name']}: {said['message']}" for each in public for said in each["diagnostics"]]
    assert wrong == []
    assert told["completenessScore"] == 1.0


@pytest.mark.parametrize("name", DOORS)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value: object = getattr(meshrl, name)
    if inspect.isclass(value):
        assert (vars(value).get("__doc__") or "").strip()
    elif inspect.isroutine(value):
        assert (value.__doc__ or "").strip()
    else:
        assert documented(name), f"write a docstring below {name}"


def documented(name: str) -> bool:
    """Whether a text stands below the line that gives a name its value."""
    door = importlib.import_module(DOORS[name])
    for file in Path(str(door.__file__)).parent.glob("*.py"):
        body = ast.parse(file.read_text("utf-8")).body
        for assignment, after in zip(body, [*body[1:], None], strict=True):
            target = (
                assignment.targets[0] if isinstance(assignment, ast.Assign) else getattr(assignment, "target", None)
            )
            if isinstance(target, ast.Name) and target.id == name:
                return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False
