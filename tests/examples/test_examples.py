"""Each script in examples/ runs as its first lines say, in an empty folder, and does what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.first_hour.chat_model import save_model

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process


def printed(name: str, folder: Path, *arguments: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_updates_a_model_folder(tmp_path: Path) -> None:
    mine = save_model(tmp_path / "mine")
    told = printed("library.py", tmp_path, "mine")
    assert "runs/first/model" in told
    updated = tmp_path / "runs" / "first" / "model" / "model.safetensors"
    assert updated.read_bytes() != (mine / "model.safetensors").read_bytes()


def test_a_role_of_ones_own_sees_each_row_once(tmp_path: Path) -> None:
    lines = printed("role.py", tmp_path).splitlines()
    assert lines[-2:] == ["0 unknown words in 16 rows", "192 rows checked"]


def test_a_backend_of_ones_own_learns(tmp_path: Path) -> None:
    *steps, greedy = printed("backend.py", tmp_path).splitlines()
    first, *_, last = (int(line.partition("%")[0]) for line in steps)
    assert first < 50 < last
    assert greedy == "greedy completions: 1234 2345 3456 4567 5678 6789"


def test_overlap_saves_time_in_virtual_time(tmp_path: Path) -> None:
    told = printed("overlap.py", tmp_path)
    synchronous, overlapped, further = (int(found) for found in re.findall(r"(\d+) seconds", told))
    assert further <= overlapped < 0.7 * synchronous


def test_an_agent_is_rewarded_and_learned(tmp_path: Path) -> None:
    told = printed("agent.py", tmp_path)
    assert sorted(set(re.findall(r"[01]\.\d", told))) == ["0.5", "1.0"]
    assert len(re.findall(r"tokens learned", told)) == 3


def test_each_example_says_how_it_is_run_and_is_tested_here() -> None:
    tested = set(re.findall(r'printed\("(\w+\.py)"', Path(__file__).read_text("utf-8")))
    scripts = {path.name: path for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == tested
    for name, path in scripts.items():
        assert f"    python examples/{name}" in path.read_text("utf-8")
