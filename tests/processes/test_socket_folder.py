"""What killed processes leave of their sockets, the next one removes, and touches nothing of those that live."""

import subprocess
import sys
from pathlib import Path

import psutil

from meshrl.engines.transport import listen, remove_folder, socket_folder

HOLDS = """
from meshrl.engines.transport import listen, socket_folder
folder = socket_folder()
listening = listen(folder / "rank")
print(folder, flush=True)
input()
"""


def test_the_folder_of_a_killed_process_goes_with_the_next() -> None:
    command = [sys.executable, "-c", HOLDS]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout
        assert living.stdout
        left, there = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        killed.kill()
        killed.wait()
        assert (left / "rank").is_socket()
        files = psutil.Process().num_fds()
        folder = socket_folder()
        listen(folder / "rank").close()
        assert not left.exists()
        assert (there / "rank").is_socket()
        remove_folder(folder)
        assert not folder.exists()
        assert psutil.Process().num_fds() == files
        living.kill()
    remove_folder(socket_folder())
    assert not there.exists()
