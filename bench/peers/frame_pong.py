"""The frames of a call, and nothing else of meshrl's: the limit of a call in Python with an event loop.

Processes decode each question and answer it at once: with no task, no actor and no order of calls. The caller encodes a
question for each, and waits in its event loop until all have answered. Rows are plain arrays, which the caller divides
by tokens and joins in order: with no names, no checks, and nothing that outlives the call. Measured by bench/calls.py.
As a script it is one of the processes: `python -m bench.peers.frame_pong DESCRIPTOR`.
"""

import asyncio
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.harness import ROOT
from meshrl.engines.remote import Call, Connection
from meshrl.engines.remote.sockets import Answer, Question, decode, encode

ASK: Final = Call("nothing", "0123456789abcdef", "0123456789abcdef", 0)

Rows: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""Tokens, offsets of the rows, and the rows' numbers."""


class FramePongs:
    """A number of processes, each at the other end of a connection of the running loop."""

    def __init__(self, count: int) -> None:
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._left = 0
        self._answers: dict[int, bytes] = {}
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "bench.peers.frame_pong", str(theirs.fileno())]
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT))
            self._connections.append(Connection(ours, self._received, self._ended))

    async def ping(self) -> None:
        """Ask all, then wait for all."""
        await self._ask([b""] * len(self._connections))

    async def echo(self, rows: Rows) -> Rows:
        """Divide the rows over all, who return them, and join them again."""
        parts = divided(rows, len(self._connections))
        await self._ask([pickle.dumps(part, 5) for part in parts])
        return joined([pickle.loads(self._answers[number]) for number in range(len(parts))])  # noqa: S301 -- our own

    async def _ask(self, contents: Sequence[bytes]) -> None:
        self._left = len(self._connections)
        self._all = asyncio.get_running_loop().create_future()
        for number, (connection, content) in enumerate(zip(self._connections, contents, strict=True)):
            connection.send(encode(Question(number, "call", ASK, content)))
        await self._all

    def _received(self, frame: bytes) -> None:
        answer = decode(frame)
        assert isinstance(answer, Answer)
        self._answers[answer.number] = answer.value
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


def divided(rows: Rows, parts: int) -> list[Rows]:
    """Divide rows into runs of about equally many tokens."""
    tokens, offsets, numbers = rows
    ends = [0, *offsets.searchsorted(len(tokens) * np.arange(1, parts) / parts).tolist(), len(numbers)]
    return [
        (tokens[offsets[start] : offsets[end]], offsets[start : end + 1] - offsets[start], numbers[start:end])
        for start, end in pairwise(ends)
    ]


def joined(parts: Sequence[Rows]) -> Rows:
    """Join rows in the order of their numbers."""
    tokens, numbers = np.concatenate([part[0] for part in parts]), np.concatenate([part[2] for part in parts])
    lengths = np.concatenate([np.diff(part[1]) for part in parts])
    order = numbers.argsort(kind="stable")
    starts = (lengths.cumsum() - lengths)[order]
    offsets = np.concatenate([[0], lengths[order].cumsum()])
    index = (starts - offsets[:-1]).repeat(lengths[order]) + np.arange(len(tokens))
    return tokens[index], offsets, numbers[order]


async def pong(end: socket.socket) -> None:
    """Answer everything until the other end is closed."""
    over = asyncio.Event()

    def received(frame: bytes) -> None:
        question = decode(frame)
        assert isinstance(question, Question)
        content = question.values
        answer = pickle.dumps(pickle.loads(content), 5) if content else b""  # noqa: S301 -- from the benchmark
        connection.send(encode(Answer(question.number, answer)))

    connection = Connection(end, received, over.set)
    await over.wait()


if __name__ == "__main__":
    asyncio.run(pong(socket.socket(fileno=int(sys.argv[1]))))
