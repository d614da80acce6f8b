"""Run a program, and end all that it leaves: `python supervisor.py PARENT COUNT ENDING... COMMAND...`.

The supervisor adopts what the command starts, also in other sessions. It ends all of it when the command has
ended, when it gets a signal, and when `PARENT`, the process that started it, is gone, however it ended. Its status is
the command's, or as env(1) has it: 127 if there is no such program, 126 if it cannot be run, and 125 if the machine
could not start it. This script imports no meshrl, which would take longer than many commands.
"""

import ctypes
import errno
import os
import select
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing them would take as long as all else
    from collections.abc import Sequence
    from typing import Final, NoReturn

NOT_STARTED: "Final" = 125
"""The status for a command that the machine could not start, as of docker and podman."""
LONGEST: "Final" = 30
"""Seconds that the ending may take. Then the supervisor ends by SIGALRM."""
_LOOK: "Final" = 0.5
"""Seconds between two looks at the parent."""
_TRIES: "Final" = 1000
"""Rounds in which descendants are killed. The kernel may hold some for longer."""
_SUBREAPER, _DUMPABLE = 36, 4
"""Constants of prctl(2)."""
_SIGNALS: "Final" = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WRONG: "Final" = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126, errno.E2BIG: 126}
"""Statuses for errors of a command, not of the machine."""


def supervised(command: "Sequence[str]", ending: "Sequence[str]" = ()) -> "list[str]":
    """Return the command line that runs a command under a supervisor of this process.

    `ending`: a command that runs if the first one did not end by itself. Start the supervisor in its own session,
    and end it by SIGTERM.
    """
    own = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(len(ending))]
    return [*own, *ending, *command]


def main() -> "NoReturn":
    """Run the command to its end, and then end all that it started.

    Ray kills the children of a worker that ends. So a child of this process does the work, and ends all in that case.
    """
    count = int(sys.argv[2])
    ending, command = sys.argv[3 : 3 + count], sys.argv[3 + count :]
    ready, outer = _listen(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child has its own pipe for them
    if inner := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        status = _watch(inner, int(sys.argv[1]), ready)
        if status is None:
            os.kill(inner, signal.SIGTERM)
            os.kill(inner, signal.SIGCONT)  # the command may have stopped it
            status = _ended(inner, ready)
        _end_children()
        _exit_as(status)
    ready = _listen()
    try:
        first = _start(command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(_WRONG.get(error.errno or 0, NOT_STARTED))
    status = _watch(first, outer, ready)
    was_ended = status is None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(first, signal.SIGKILL)
    status = os.waitpid(first, 0)[1] if status is None else status
    _end_children()
    if ending and was_ended:
        signal.alarm(LONGEST)
        with suppress(OSError):
            os.waitpid(_start(ending, silent=(0, 1, 2)), 0)
    _exit_as(status)


def adopt() -> None:
    """Become the parent of what descendants of this process leave."""
    _control(_SUBREAPER, 1)


def end_all(parent: int) -> None:
    """Kill a child of this process that has called `adopt`, and all its descendants."""
    with suppress(ProcessLookupError):
        os.kill(parent, signal.SIGSTOP)  # it reaps nobody, and starts nothing
        for _ in range(_TRIES):
            if not sum(map(_kill, _children(parent))):
                break
            time.sleep(0.001)
        os.kill(parent, signal.SIGKILL)


def _listen() -> int:
    """Adopt what descendants leave, and return the end of a pipe to which signals are written."""
    adopt()
    _control(_DUMPABLE, 0)  # a command of the same user may not change this process
    ready, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the process that started this one may have blocked some
    return ready


def _watch(child: int, parent: int, ready: int) -> "int | None":
    """Wait for the end of a child, and return its status. None if it has to be ended."""
    status, is_signalled = _reap(child), False
    while status is None and not is_signalled and os.getppid() == parent:
        if select.select([ready], [], [], _LOOK)[0]:
            is_signalled = any(number != signal.SIGCHLD for number in os.read(ready, 4096))
        status = _reap(child)
    return status


def _ended(child: int, ready: int) -> int:
    """Wait for the end of a child that ends its own children, kill it if that takes too long, and return its status."""
    until = time.monotonic() + LONGEST + 5
    while (status := _reap(child)) is None and (left := until - time.monotonic()) > 0:
        if select.select([ready], [], [], left)[0]:
            os.read(ready, 4096)
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return status


def _start(command: "list[str]", silent: "Sequence[int]" = ()) -> int:
    """Start a command in its own session, some streams silent. It must not ignore the signals that Python ignores."""
    actions = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in silent]
    own = (signal.SIGPIPE, signal.SIGXFSZ)
    return os.posix_spawnp(
        command[0], command, os.environ, file_actions=actions, setsid=True, setsigmask=(), setsigdef=own
    )


def _reap(first: int) -> "int | None":
    """Reap what has ended, and return the status of the first process if that has."""
    status = None
    while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        status = ended[1] if ended[0] == first else None
    return status


def _end_children() -> None:
    """End every descendant: the children of each that ends become children of this process.

    What belongs to another user is left, and what the kernel holds for longer than `LONGEST`.
    """
    until = time.monotonic() + LONGEST
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            if not sum(map(_kill, _children(os.getpid()))):
                return
            time.sleep(0.001)


def _kill(pid: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _children(parent: int) -> "list[int]":
    """List the children of a process that have not ended."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            state, of, *_ = stat.read().rpartition(b")")[2].split()
            if int(of) == parent and state != b"Z":
                found.append(int(name))
    return found


def _exit_as(status: int) -> "NoReturn":
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):  # SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 255)


def _control(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


if __name__ == "__main__":
    main()
