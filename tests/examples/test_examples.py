import re
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import TypeAlias

import pytest

from tests.first_hour.chat_model import save_model

ROOT = Path(__file__).parents[2]
Printed: TypeAlias = Callable[..., str]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_library_updates_a_model_folder(printed: Printed) -> None:
    mine, updated = save_model(Path("mine")), Path("runs/first/model")
    assert str(updated) in printed("library.py", "mine")
    before, after = ((folder / "model.safetensors").read_bytes() for folder in (mine, updated))
    assert before != after
    recorded = Path("runs/first/config.toml").read_text("utf-8")
    assert f'function = "{ROOT / "examples" / "library.py"}:digits"' in recorded, "it can be run again"


def test_a_role_of_ones_own_sees_each_row_once(printed: Printed) -> None:
    assert printed("role.py").splitlines()[-2:] == ["0 unknown words in 16 rows", "192 rows checked"]


def test_a_backend_of_ones_own_learns(printed: Printed) -> None:
    *steps, greedy = printed("backend.py").splitlines()
    first, *_, last = (int(line.partition("%")[0]) for line in steps)
    assert first < 50 < last
    assert greedy == "greedy completions: 1234 2345 3456 4567 5678 6789"


def test_overlap_saves_time_in_virtual_time(printed: Printed) -> None:
    synchronous, overlapped, further = map(int, re.findall(r"(\d+) seconds", printed("overlap.py")))
    assert further <= overlapped < 0.7 * synchronous


def test_an_agent_is_rewarded_and_learned(printed: Printed) -> None:
    told = printed("agent.py")
    assert sorted(set(re.findall(r"[01]\.\d", told))) == ["0.5", "1.0"]
    assert len(re.findall(r"tokens learned", told)) == 3


def test_each_example_says_how_it_is_run_and_is_tested_here() -> None:
    scripts = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == set(re.findall(r'printed\("(\w+\.py)"', Path(__file__).read_text("utf-8")))
    for name, text in scripts.items():
        assert f"    python examples/{name}" in text
