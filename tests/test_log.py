"""Log lines whose reader is gone."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from meshrl import log
sys.stdin.readline()
log.info("one")
log.warning("two")
print("done")
"""


@pytest.mark.process
def test_a_closed_pipe_does_not_end_who_logs() -> None:
    reads, writes = os.pipe()
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writes, text=True) as process:
        os.close(writes)
        os.close(reads)
        assert process.communicate("go\n")[0] == "done\n"
    assert process.returncode == 0
