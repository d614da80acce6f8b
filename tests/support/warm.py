"""Engines' templates and processes of users' code are forked from one warm process, so a session imports torch,
transformers and meshrl once for all of them.

`install()` replaces `subprocess.Popen` by one which does that for `python -m meshrl.engines.processes.template` and for
a supervised `meshrl.tasks.user_worker`, and starts everything else as ever.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from meshrl import supervisor
from tests.support.warm_process import Start

TEMPLATE = [sys.executable, "-m", "meshrl.engines.processes.template"]
SUPERVISOR = [sys.executable, "-I", "-S", supervisor.__file__]
PARENT = "the warm process"
"""In place of a number: it is the parent of what it forks, and ends with the process that asks for it."""
_start_cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class _WarmProcess:
    """The process that forks, started when it is needed first. It ends with this process."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._pid = 0
        self._one = threading.Lock()
        """Held by one thread from its order to the answer, which has no name."""

    def start(self, order: Start, files: list[int]) -> int:
        with self._one:
            return self._start(order, files)

    def _start(self, order: Start, files: list[int]) -> int:
        if self._control is None or self._pid != os.getpid():
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._pid = os.getpid()
            with theirs:
                pipe = theirs.fileno()
                command = [sys.executable, "-m", "tests.support.warm_process", str(pipe)]
                path = os.pathsep.join(filter(None, sys.path))
                own = {"PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA, once asked, refuses forks
                environment = {"GOMP_SPINCOUNT": "5000", **os.environ, **own}
                self._process = subprocess.Popen(
                    command, pass_fds=[pipe], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
                atexit.register(self._end, self._pid)
        order["arguments"] = [str(self._process.pid) if each == PARENT else each for each in order["arguments"]]
        socket.send_fds(self._control, [json.dumps(order).encode()], files)
        return int(self._control.recv(64))

    def _end(self, pid: int) -> None:
        if self._control is not None and pid == os.getpid():
            self._control.close()
            self._process.wait()


_warm_process = _WarmProcess()


class WarmPopen(subprocess.Popen[Any]):
    """A process that was forked from the warm one, if its command is one of those."""

    _status = -1
    """The pipe that its wait status comes through. It is no child of this process."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        command = list(args) if isinstance(args, (list, tuple)) else []
        if command[:3] == TEMPLATE:
            module, arguments = command[2], command[3:]
        elif command[:4] == SUPERVISOR and command[6:8] == [sys.executable, "-c"] and "user_worker" in command[8]:
            module, arguments = "meshrl.supervisor", [PARENT, *command[5:]]
        else:
            _start_cold(self, args, *others)
            return
        names = "executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite "
        names += "c2pread c2pwrite errread errwrite restore_signals gid gids uid umask start_new_session process_group"
        asked = dict(zip(names.split(), others, strict=True))
        self._status, theirs = os.pipe()
        given = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        standard = [own if each == -1 else each for own, each in enumerate(given)]
        kept = sorted(asked["pass_fds"])
        order: Start = {
            "module": module,
            "arguments": arguments,
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "folder": str(asked["cwd"] or Path.cwd()),
            "files": kept,
            "new_session": bool(asked["start_new_session"]),
        }
        try:
            self.pid = _warm_process.start(order, [*standard, *kept, theirs])
        finally:
            os.close(theirs)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[pipe] for pipe in pipes))  # type: ignore[attr-defined]

    def _returned(self, seconds: float | None) -> int | None:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if self.returncode is None and poll.poll(None if seconds is None else seconds * 1000):
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status, 16) or b"0"))
            os.close(self._status)
        return self.returncode

    def _internal_poll(self, *others: Any, **named: Any) -> int | None:
        if self._status == -1:
            return super()._internal_poll(*others, **named)  # type: ignore[misc, no-any-return]
        return self._returned(0)

    def _wait(self, timeout: float | None) -> int:
        if self._status == -1:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if (returned := self._returned(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return returned


def install() -> None:
    subprocess.Popen = WarmPopen  # type: ignore[misc]
