"""Code that lies to its judge, holds it up, or leaves something behind."""

import tempfile
from pathlib import Path

import pytest

from meshrl.rewards.sandbox import Limits, Outcome, run_tests

LIMITS = Limits(timeout=3, memory_mib=256)
JOB = """
import sys
frame = sys._getframe()
while "job" not in frame.f_locals:
    frame = frame.f_back
job = frame.f_locals["job"]
"""


CODES: dict[str, Outcome] = {
    "import os\nfor name in os.listdir('.'): os.remove(name)\nos.mkfifo('result')": "passed",
    "import os, glob\nfor name in ('result', 'result-0'): os.symlink('/dev/zero', name)": "passed",
    f"{JOB}\nimport os\nos.write(job['result'], b'[' * 60_000)\nassert False": "failed",
    f"{JOB}\nimport os\nos.write(job['result'], (job['secret'] + ' 7').encode())\nos._exit(0)": "failed",
    f"{JOB}\nimport os\nwhile True: os.write(job['result'], b'x' * 4096)": "timeout",
    f"{JOB}\nimport os\nos.close(job['result'])": "failed",
}


async def test_the_judge_is_neither_held_up_nor_believes_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="meshrl-judge-"))  # of this test alone, whoever the sandboxes run as
    folder.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    results = {code: await run_tests(code, ["assert True"], LIMITS) for code in CODES}
    assert {code: result.outcome for code, result in results.items()} == CODES, results
    folder.rmdir()  # of the sandboxes nothing is left
