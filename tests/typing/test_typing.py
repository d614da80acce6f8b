"""Both checkers accept good.py whole, and report the marked lines of bad.py and no others."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

HERE = Path(__file__).parent
GOOD, BAD = HERE / "good.py", HERE / "bad.py"

MYPY = ["mypy", "--strict", "--no-pretty", str(GOOD), str(BAD)]
# A project of its own: the main one leaves bad.py out.
PYRIGHT = ["pyright", "--project", str(HERE), "--pythonpath", sys.executable]
REPORTS = {
    "mypy": (MYPY, re.compile(r"(\w+)\.py:(\d+): error: ")),
    "pyright": (PYRIGHT, re.compile(r"(\w+)\.py:(\d+):\d+ - (?:error|warning): ")),
}
"""The command of each checker, and how it reports a line of a file."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", REPORTS)
def test_a_checker_reports_the_marked_lines_and_no_others(checker: str) -> None:
    command, report = REPORTS[checker]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    found = {(name, int(line)) for name, line in report.findall(done.stdout)}
    lines = BAD.read_text("utf-8").splitlines()
    marked = {("bad", number) for number, line in enumerate(lines, start=1) if line.endswith("# E")}
    assert len(marked) >= 20
    assert found == marked, done.stdout + done.stderr


def test_good_code_runs() -> None:
    asyncio.run(run_path(str(GOOD))["main"]())
