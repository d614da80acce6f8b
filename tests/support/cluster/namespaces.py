"""Processes in their own namespaces. To the kernel, a host or a switch is nothing else."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import IO, Any, Final, cast

from meshrl.errors import ConfigError

_INIT: Final = Path(__file__).with_name("init.py")
_PROGRAMS: Final = ("ip", "tc", "unshare", "nsenter")
HOST: Final = ("net", "mount", "uts", "ipc")
_STOP: Final = 10.0
"""Seconds that the kernel has to end the processes of a namespace."""


def missing() -> str | None:
    """Why this machine cannot make hosts. None if it can."""
    if not sys.platform.startswith("linux"):
        return "hosts are namespaces of Linux, and this is another system"
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root may make: run it with sudo, or in a privileged container"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not found: install the packages iproute2 and util-linux"
    try:
        Namespace(*HOST, ahead=1).end()
    except ConfigError as error:
        return str(error)
    return None


class Inside(subprocess.Popen[str]):
    """A program in a namespace. Signals go to the program, not to the command that entered the namespace."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the program has ended."""
        while self.poll() is None:
            if program := self._program():
                os.kill(program, sig)
                return
            time.sleep(0.01)  # it has just been started

    def _program(self) -> int | None:
        try:
            return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("ascii").split()[0])
        except (FileNotFoundError, IndexError):
            return None


class Namespace:
    """Namespaces with a first process. When that ends, all other processes end too."""

    def __init__(self, *kinds: str, furniture: Mapping[str, object] | None = None, ahead: int = 0) -> None:
        """`kinds`: in addition to pid. `furniture`: see `init.furnish`. `ahead`: seconds to advance the clock."""
        options = [f"--{kind}" for kind in kinds]
        if ahead:
            options += ["--time", "--monotonic", str(ahead)]
        if "mount" in kinds:
            options.append("--mount-proc")
        command = ["unshare", *options, "--pid", "--fork", "--kill-child", "--", sys.executable, "-IS", str(_INIT)]
        # In a new session, so that Ctrl-C reaches it only through its maker.
        self._first = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
        self._kinds = (*kinds, "pid", *(["time"] if ahead else []))
        try:
            piped(self._first.stdin).write(json.dumps(furniture) + "\n")
            piped(self._first.stdin).flush()
        except BrokenPipeError:
            pass  # the reason for its end is reported below
        if piped(self._first.stdout).readline() != "ready\n":
            said = piped(self._first.stderr).read().strip() or "it said nothing"
            self.end()
            raise ConfigError(f"the kernel gives no namespaces here: {said.splitlines()[-1]}")

    @property
    def pid(self) -> int:
        """A process in the namespace's network."""
        return self._first.pid

    @property
    def is_there(self) -> bool:
        return self._first.poll() is None

    def enter(self, *kinds: str) -> list[str]:
        """The prefix for a command that runs in these namespaces, by default in all."""
        folder = Path("/proc", str(self.pid), "ns")
        files = {"net": "net", "mount": "mnt", "uts": "uts", "ipc": "ipc"}
        files |= {"pid": "pid_for_children", "time": "time_for_children"}
        return ["nsenter", *(f"--{kind}={folder / files[kind]}" for kind in kinds or self._kinds), "--"]

    def start(self, command: Sequence[str], **named: Any) -> Inside:
        """Start a program in the namespace. `named`: arguments of `subprocess.Popen`."""
        return Inside([*self.enter(), *command], text=True, start_new_session=True, **named)

    def do(self, *command: str, lines: Sequence[str] = (), fails: bool = False) -> bool:
        """Run a command on its network, with `lines` as input. If it fails: ConfigError, or False with `fails`."""
        full = [*self.enter("net"), *command]
        done = subprocess.run(full, input="\n".join(lines), text=True, stdout=PIPE, stderr=STDOUT, check=False)
        if done.returncode and not fails:
            raise ConfigError(f"`{' '.join(command)}` failed: {done.stdout.strip()}")
        return not done.returncode

    def end(self) -> None:
        """End every process in the namespace, and wait for them."""
        first = self._first
        with suppress(BrokenPipeError):  # it may have ended without reading
            piped(first.stdin).close()
        try:
            first.wait(_STOP)
        except subprocess.TimeoutExpired:
            first.kill()
            first.wait()
        for pipe in (first.stdout, first.stderr):
            piped(pipe).close()


def piped(pipe: IO[str] | None) -> IO[str]:
    return cast("IO[str]", pipe)
