"""The wheel, in an environment that has what it needs and nothing else."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distribution, requires
from pathlib import Path
from typing import TypeAlias

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FAKES = ("policy.backend=fake", "sampler.backend=fake", "reward.backend=fake")
Meshrl: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.process


def needed(name: str) -> dict[str, Distribution]:
    """What a package needs without an extra, and what that needs."""
    found: dict[str, Distribution] = {}
    names = [name]
    while names:
        for line in requires(names.pop()) or ():
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                names.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages as `pip install WHEEL` brings them into an empty environment: without those of any extra."""
    folder = tmp_path_factory.mktemp("site")
    for each in needed("meshrl").values():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] != ".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(each.locate_file(top))))
    built = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def meshrl(site: Path, tmp_path: Path) -> Meshrl:
    """Runs the command in an empty folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from meshrl.cli import main; main()"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [sys.executable, "-S", "-c", code, str(site), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)

    return run


def test_a_run_on_fakes_needs_no_extra_and_no_file(meshrl: Meshrl, tmp_path: Path) -> None:
    done = meshrl("run", "grpo/quickstart", *FAKES, "steps=12", "policy.optimizer.total_steps=12")
    assert done.returncode == 0, done.stderr
    assert re.search(r"exact_match_after +1\b", done.stdout)
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["grpo/quickstart"], r"meshrl\[torch\]"),
        (["grpo/smollm2", *FAKES], r"meshrl\[tasks\]"),
        (["grpo/quickstart", *FAKES, "run.engine=ray"], r"meshrl\[ray\]"),
    ],
)
def test_what_needs_an_extra_says_what_to_type(meshrl: Meshrl, arguments: list[str], says: str) -> None:
    done = meshrl("run", *arguments)
    assert done.returncode == 1
    assert re.search(f"pip install '{says}'", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
