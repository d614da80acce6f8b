"""What `meshrl launch ssh` sends to a host, whatever the user's login shell is."""

import shutil
import subprocess
from pathlib import Path

import pytest

from meshrl.run.launch import SSH, SshCluster

# In Python's place: it describes a host, or writes down what is to run.
PYTHON = """#!/bin/sh
case "$2" in
    *meshrl-probe*) echo 'meshrl-probe [[], "10.0.0.1", 2, 0]' ;;
    *) printf '<%s>\n' "$@" "$(pwd)" "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" > told; exit 7 ;;
esac
"""


@pytest.mark.parametrize("shell", [each for each in ("sh", "bash", "zsh", "fish", "tcsh") if shutil.which(each)])
def test_each_login_shell_runs_a_command_as_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    folder = tmp_path / "it's mine! $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, text in {"python": PYTHON, "ssh": f'#!/bin/sh\nexec {shutil.which(shell)} -c "$2"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    odd = "task.prompt=\\'It's\\n \"so\"!\nand $HOME!"
    with SshCluster(["one"], ssh=str(tmp_path / "ssh"), python=str(tmp_path / "python")) as cluster:
        assert cluster.machines == [("one", "10.0.0.1", 2, 0)]
        assert cluster.run([odd]) == 7
    told = (folder / "told").read_text()
    assert f"<run>\n<{odd}>\n<run.engine=10.0.0.1:6379>\n<{folder}>\n<token 64>\n" in told


def test_ssh_gives_up_a_host_that_is_silent() -> None:
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh on this machine")
    shown = subprocess.run([*SSH.split(), "-G", "one"], capture_output=True, text=True, check=True).stdout
    assert {"serveraliveinterval 30", "serveralivecountmax 4", "batchmode yes"} <= {*shown.splitlines()}
