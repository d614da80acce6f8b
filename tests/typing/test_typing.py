"""Both checkers accept good.py whole, and report the marked lines of bad.py alone; all public types are known."""

import asyncio
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from runpy import run_path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOOD, BAD = HERE / "good.py", HERE / "bad.py"

MYPY = ["mypy", "--strict", "--no-pretty", str(GOOD), str(BAD)]
# A project of its own: the main one leaves bad.py out.
PYRIGHT = ["pyright", "--project", str(HERE), "--pythonpath", sys.executable]
REPORTS = {
    "mypy": (MYPY, re.compile(r"(\w+)\.py:(\d+): error: ")),
    "pyright": (PYRIGHT, re.compile(r"(\w+)\.py:(\d+):\d+ - (?:error|warning): ")),
}
"""The command of each checker, and how it reports a line of a file."""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("checker", ["pyright", pytest.param("mypy", marks=pytest.mark.wide)])
def test_a_checker_reports_the_marked_lines_and_no_others(checker: str) -> None:
    command, report = REPORTS[checker]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {(name, int(line)) for name, line in report.findall(done.stdout)}
    lines = BAD.read_text("utf-8").splitlines()
    marked = {("bad", number) for number, line in enumerate(lines, start=1) if line.endswith("# E")}
    assert len(marked) >= 20
    assert found == marked, done.stdout + done.stderr


def test_good_code_runs() -> None:
    asyncio.run(run_path(str(GOOD))["main"]())


@pytest.mark.slow
@pytest.mark.process
def test_all_public_types_are_known() -> None:
    """As `pyright --verifytypes` counts: what is not private, and what that refers to, in each module."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "meshrl"]
    path = [str(ROOT), str(ROOT / "backends"), sysconfig.get_paths()["purelib"]]
    environment = {"PYTHONPATH": ":".join(path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "--ignoreexternal", "--outputjson"], capture_output=True, text=True, check=False, env=environment
    )
    told = json.loads(done.stdout)["typeCompleteness"]
    public = [symbol for symbol in told["symbols"] if symbol["isExported"]]
    assert len(public) > 3000, done.stdout[:1000]
    wrong = [f"{each['name']}: {said['message']}" for each in public for said in each["diagnostics"]]
    assert wrong == []
    assert told["completenessScore"] == 1.0
