import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution, requires
from pathlib import Path
from typing import TypeAlias

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
Meshrl: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


def build(source: Path, target: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


def uv(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run uv, which takes no setting but these and downloads no Python."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "VIRTUAL_ENV"))}
    environment = own | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"} | variables
    command = [str(Path(sys.executable).parent / "uv"), *arguments]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def run_in(environment: Path, folder: Path) -> Meshrl:
    def run(*arguments: str, program: str = "meshrl") -> subprocess.CompletedProcess[str]:
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [str(environment / "bin" / program), *arguments]
        return subprocess.run(command, cwd=folder, env=variables, check=False, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def install(wheel: Path, folder: Path, *extras: str) -> Path:
    """What `pip install 'WHEEL[EXTRAS]'` makes of an empty environment, without an index: dependencies link to ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    done = uv("pip", "install", "--offline", "--no-deps", "--python", python, str(wheel))
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    for each in dependencies(*extras):
        for top in {file.parts[0] for file in each.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(each.locate_file(top))))
    return folder


def dependencies(*extras: str) -> Iterator[Distribution]:
    wanted: list[tuple[str, set[str]]] = [("meshrl", {"", *extras})]
    seen = set[str]()
    while wanted:
        name, chosen = wanted.pop()
        for need in map(Requirement, requires(name) or ()):
            applies = need.marker is None or any(need.marker.evaluate({"extra": each}) for each in chosen)
            if applies and str(need) not in seen:
                seen.add(str(need))
                wanted.append((need.name, {"", *need.extras}))
                if need.name != "meshrl":
                    yield distribution(need.name)


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture
def meshrl(environment: Path, tmp_path: Path) -> Meshrl:
    return run_in(environment, tmp_path)
