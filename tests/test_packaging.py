"""The wheel holds everything that the command line needs, also outside a checkout."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "content")
    return folder / "content"


def test_the_wheel_holds_both_packages_and_what_is_shipped(unpacked: Path) -> None:
    for folder in ("algorithms", "configs"):
        there = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.*")}
        shipped = unpacked / "meshrl" / "_shipped" / folder
        assert {path for path in there if "__pycache__" not in path.parts} == {
            path.relative_to(shipped) for path in shipped.rglob("*.*")
        }
    for package in (ROOT / "meshrl", *ROOT.glob("backends/meshrl_*")):
        assert (unpacked / package.name / "__init__.py").is_file()
        assert (unpacked / package.name / "py.typed").is_file()


def test_the_wheel_announces_each_backend(unpacked: Path) -> None:
    (announced,) = unpacked.glob("*.dist-info/entry_points.txt")
    lines = announced.read_text("utf-8").splitlines()
    for name in ("torch", "fsdp", "http", "megatron", "sglang", "vllm"):
        assert f"{name} = meshrl_{name}" in lines


def test_the_command_line_finds_the_shipped_configurations_in_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from meshrl.cli import main; main(['configs'])"
    command = [sys.executable, "-c", code, str(unpacked)]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    for path in (ROOT / "configs").rglob("*.toml"):
        assert path.relative_to(ROOT / "configs").with_suffix("").as_posix() in done.stdout


def test_the_backends_announce_themselves() -> None:
    assert {"torch", "fake"} <= entry_points(group="meshrl.backends").names


def test_the_extras_that_texts_name_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    texts = [
        ROOT / "README.md",
        *(path for folder in ("docs", "meshrl", "backends") for path in (ROOT / folder).rglob("*.[mp][dy]")),
    ]
    named = {name for text in texts for name in re.findall(r"meshrl\[(\w+)\]", text.read_text("utf-8"))}
    assert named <= extras.keys()
    # What an error says of a backend that is not installed: the extra of its name.
    assert {entry.name for entry in entry_points(group="meshrl.backends") if entry.value.startswith("meshrl_")} <= (
        extras.keys()
    )


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    pinned = dict(
        line.split("==") for line in (ROOT / "requirements-lowest.txt").read_text("utf-8").splitlines() if "==" in line
    )
    for name, lowest in (need.split(">=") for need in needs):
        assert f"{pinned[name]}.0".startswith(f"{lowest}."), name
