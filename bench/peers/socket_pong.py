"""Bare Unix sockets: processes that echo what they receive, and a caller that sends to all, then waits for all.

Blocking, they are the limit of a call between processes: no loop, no thread, no serialisation. With only an event loop
at both ends, they show what asyncio adds. Measured by bench/calls.py and bench/scale.py. As a script it is one of the
processes: `socket_pong.py DESCRIPTOR [loop]`.
"""

import asyncio
import socket
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

PING: Final = bytes(64)
"""About as long as the frame of an empty call."""


class Pongs:
    """A number of processes, each at the other end of a socket."""

    def __init__(self, count: int, *, looped: bool = False) -> None:
        """`looped`: each waits in an event loop."""
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                # Without `site`, whose packages would only cost memory.
                command = [sys.executable, "-S", __file__, str(theirs.fileno()), *(["loop"] if looped else [])]
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self._ends.append(ours)
        self.ping()

    def ping(self) -> None:
        """Send to all, then wait for all."""
        for end in self._ends:
            end.send(PING)
        for end in self._ends:
            assert end.recv(len(PING)) == PING

    async def ping_in_loop(self) -> None:
        """The same in the running loop."""
        answers = [self._answer(end) for end in self._ends]
        for end in self._ends:
            end.send(PING)
        for answer in answers:
            await answer

    def _answer(self, end: socket.socket) -> asyncio.Future[None]:
        loop = self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            assert end.recv(len(PING)) == PING
            answer.set_result(None)

        loop.add_reader(end, read)  # set anew for each ping, which only changes one callback
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets, which ends the processes."""
        for end in self._ends:
            if self._loop is not None:
                self._loop.remove_reader(end)
            end.close()
        for process in self._processes:
            process.wait()


def pong(end: socket.socket) -> None:
    """Echo everything until the other end is closed."""
    while some := end.recv(len(PING)):
        end.send(some)


def pong_in_loop(end: socket.socket) -> None:
    """The same in an event loop."""
    loop = asyncio.new_event_loop()

    def read() -> None:
        some = end.recv(len(PING))
        if some:
            end.send(some)
        else:
            loop.stop()

    loop.add_reader(end, read)
    loop.run_forever()
    loop.close()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as mine:
        (pong_in_loop if sys.argv[2:] else pong)(mine)
