"""Each script of the pages and each example, with ranks that are processes."""

import re
import sys
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest

from meshrl.engines import make_engine
from meshrl.mesh import Engine
from tests.first_hour.chat_model import save_model
from tests.test_pages import PAGES, ROOT, TEXTS, blocks, run_code

RUNS = re.compile(r"\bRun\(|rl\.train\(")
SHOWN = [page for page in PAGES if blocks(page) and RUNS.search(TEXTS[page]) and page.name != "testing.md"]
"""Pages with a run. Those of testing.md are in virtual time, which has one thread."""


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Engine]:
    """The engines that the script has made, in place of local ones."""
    engines: list[Engine] = []

    def make(_: str, *others: Any) -> Engine:
        engines.append(make_engine("processes", *others))
        return engines[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshrl.run.engine.make_engine", make)
    return engines


@pytest.mark.process
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_a_page(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: list[Engine]) -> None:
    run_code(page, ModuleType("__main__"), tmp_path, monkeypatch)
    assert made


@pytest.mark.process
@pytest.mark.parametrize("name", ["backend.py", "library.py", "role.py"])
def test_an_example(name: str, monkeypatch: pytest.MonkeyPatch, made: list[Engine]) -> None:
    given = [str(save_model(Path("mine")))] if name == "library.py" else []
    monkeypatch.setattr(sys, "argv", [name, *given])
    run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert made
