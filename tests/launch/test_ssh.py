"""How `meshrl launch ssh` reaches hosts."""

import shutil
import subprocess

import pytest

from meshrl.launch import SSH


def test_ssh_gives_up_a_host_that_is_silent() -> None:
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh on this machine")
    shown = subprocess.run([*SSH.split(), "-G", "one"], capture_output=True, text=True, check=True).stdout
    assert {"serveraliveinterval 30", "serveralivecountmax 4", "batchmode yes"} <= {*shown.splitlines()}
