"""Bare Unix sockets: processes that send back what they are sent, and a caller that sends to all, then waits for all.

The limit of a call between processes, with nothing but blocking reads and writes: no loop, no thread, no serialisation.
Measured by bench/calls.py and bench/scale.py; as a script it is one of the processes: `socket_pong.py DESCRIPTOR`.
"""

import socket
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

PING: Final = bytes(64)
"""About as long as the frame of an empty call."""


class Pongs:
    """So many processes, each at the other end of a socket."""

    def __init__(self, count: int) -> None:
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                # Without `site`: its packages would only cost memory.
                command = [sys.executable, "-S", __file__, str(theirs.fileno())]
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self._ends.append(ours)
        self.ping()

    def ping(self) -> None:
        """Send to all, then wait for all."""
        for end in self._ends:
            end.send(PING)
        for end in self._ends:
            assert end.recv(len(PING)) == PING

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets, which ends the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.wait()


def pong(descriptor: int) -> None:
    """Send everything back until the other end is closed."""
    with socket.socket(fileno=descriptor) as end:
        while some := end.recv(len(PING)):
            end.send(some)


if __name__ == "__main__":
    pong(int(sys.argv[1]))
