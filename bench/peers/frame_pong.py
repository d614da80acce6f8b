"""The frames of an empty call, and nothing else of meshrl's: the limit of a call in Python with an event loop.

Processes decode each question and answer it at once: with no task, no actor and no order of calls. The caller encodes a
question for each, and waits in its event loop until all have answered. Measured by bench/calls.py. As a script it is
one of the processes: `python -m bench.peers.frame_pong DESCRIPTOR`.
"""

import asyncio
import socket
import subprocess
import sys
from typing import Final, Self

from bench.harness import ROOT
from meshrl.engines.hosting import Ask
from meshrl.engines.transport import Connection
from meshrl.engines.transport.frames import Answer, Question, decode, encode

ASK: Final = Ask("nothing", "0123456789abcdef", "0123456789abcdef", 0)


class FramePongs:
    """A number of processes, each at the other end of a connection of the running loop."""

    def __init__(self, count: int) -> None:
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._left = 0
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "bench.peers.frame_pong", str(theirs.fileno())]
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT))
            self._connections.append(Connection(ours, self._received, self._ended))

    async def ping(self) -> None:
        """Ask all, then wait for all."""
        self._left = len(self._connections)
        self._all = asyncio.get_running_loop().create_future()
        for number, connection in enumerate(self._connections):
            connection.send(encode(Question(number, "call", ASK, b"")))
        await self._all

    def _received(self, frame: bytes) -> None:
        assert isinstance(decode(frame), Answer)
        self._left -= 1
        if not self._left:
            self._all.set_result(None)

    def _ended(self) -> None:
        self._all.set_exception(EOFError("a process of the benchmark has ended"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections, which ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.wait()


async def pong(end: socket.socket) -> None:
    """Answer everything until the other end is closed."""
    over = asyncio.Event()

    def received(frame: bytes) -> None:
        question = decode(frame)
        assert isinstance(question, Question)
        connection.send(encode(Answer(question.number, b"")))

    connection = Connection(end, received, over.set)
    await over.wait()


if __name__ == "__main__":
    asyncio.run(pong(socket.socket(fileno=int(sys.argv[1]))))
