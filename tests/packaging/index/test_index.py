"""What the index of pip gives: the wheel in an empty environment of each Python, and each extra's packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.first_hour.terminal import FAKES
from tests.packaging.conftest import run_in, uv
from tests.packaging.test_contents import EXTRAS

pytestmark = [pytest.mark.process, pytest.mark.slow]

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
APART = ("gpu", "sglang", "vllm")
"""Extras that each have an environment of their own. All others fit into one."""
NEWEST = {"sglang": "3.13"}
"""Extras whose packages are not there for the newest Python, and the newest for which they are."""

SETTINGS = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
"""What pip calls them, and uv."""
FROM_SOURCE = """
[[dependency-metadata]]
name = "flash-attn"
requires-dist = ["torch", "einops"]

[[dependency-metadata]]
name = "transformer-engine-torch"
requires-dist = ["torch"]
"""
"""What packages need that say so only when they are built, for which they want a compiler for GPUs."""


@pytest.fixture(scope="session")
def index() -> dict[str, str]:
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in told.stdout.splitlines():
        key, _, value = line.partition("=")
        setting = key.rpartition(".")[2]
        if setting in SETTINGS:
            found[SETTINGS[setting]] = " ".join(value.strip("'").replace("\\n", " ").split())
        elif setting == "cert":
            found["SSL_CERT_FILE"] = value.strip("'")
    asked = uv("pip", "install", "--dry-run", "--reinstall", "--no-deps", "--python", sys.executable, "xxhash", **found)
    if asked.returncode != 0:
        pytest.skip(f"no package index answers: {asked.stderr.strip().splitlines()[-1]}")
    return found


def interpreter(version: str) -> str | None:
    """A Python of that version: one on the path, or one of pyenv's."""
    there = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for python in [str(path) for path in there if path]:  # pyenv puts names on the path that do not start
        if subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_installs_and_runs(version: str, wheel: Path, index: dict[str, str], tmp_path: Path) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"there is no Python {version} on this machine")
    environment = tmp_path / "venv"
    for command in (
        ("venv", "--python", python, str(environment)),
        ("pip", "install", "--python", str(environment / "bin" / "python"), str(wheel)),
    ):
        done = uv(*command, **index)
        assert done.returncode == 0, done.stderr
    meshrl = run_in(environment, tmp_path)
    done = meshrl("run", "grpo/quickstart", *FAKES, "steps=2", "policy.optimizer.total_steps=2")
    assert done.returncode == 0, done.stderr


def test_extras_have_versions_that_fit_each_other(wheel: Path, index: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "uv.toml").write_text(FROM_SOURCE, "utf-8")
    wrong: list[str] = []
    for extras in (*APART, ",".join(sorted(EXTRAS.keys() - set(APART)))):
        (tmp_path / "needs").write_text(f"meshrl[{extras}] @ {wheel.as_uri()}", "utf-8")
        for version in (PYTHONS[0], NEWEST.get(extras, PYTHONS[-1])):
            command = ("pip", "compile", "--quiet", "--python-version", version, str(tmp_path / "needs"))
            done = uv(*command, "--config-file", str(tmp_path / "uv.toml"), **index)
            wrong += [f"{extras}, Python {version}: {done.stderr}"] if done.returncode else []
    assert not wrong, "\n".join(wrong)
