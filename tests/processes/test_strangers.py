"""Whoever comes to a rank's socket without the run's secret, or as another user: refused, logged, nothing else."""

import asyncio
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from meshrl import Actor, Mesh, Same, endpoint
from meshrl.engines.processes import ProcessEngine
from meshrl.engines.transport.frames import Question, encode
from tests.processes.conftest import NO_CORE, until

pytestmark = pytest.mark.process

SECRET = "does not know this run's secret"
NOBODY = 65534


class Counts(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def add(self) -> Same[int]:
        self.count += 1
        return self.count


class Started(NamedTuple):
    """Two ranks, and where they write."""

    engine: ProcessEngine
    counts: Counts
    output: Path

    def logged(self, words: str) -> int:
        """How many times the ranks have said it."""
        return self.output.read_text().count(words)


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Started]:
    output = tmp_path / "output"
    with written_to(output):
        engine = ProcessEngine()
        counts = await (await Mesh.reserve(engine, 2, NO_CORE)).spawn(Counts)
    yield Started(engine, counts, output)
    await engine.close()


@contextmanager
def written_to(path: Path) -> Generator[None]:
    """Processes that are started meanwhile write there."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def sockets(engine: ProcessEngine) -> list[Path]:
    assert engine._launcher._folder is not None
    return sorted(engine._launcher._folder.iterdir())


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def hung_up(stranger: socket.socket) -> bool:
    """Whether the other side has ended the connection, without a word."""
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_without_the_secret_nothing_is_read(started: Started, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    question = encode(Question(0, "place", None, pickle.dumps(Touches(touched))))
    strangers = {
        "random bytes": Random(0).randbytes(5000),
        "a wrong secret": framed(b"x" * 32) + framed(question),
        "a short secret": framed(b"") + framed(question),
        "no secret": framed(question),
        "4 GiB": b"\xff" * 4 + b"x" * 100,
    }
    paths = sockets(started.engine)
    assert len(paths) == 2
    for path in paths:
        for what, sent in strangers.items():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(20)
                stranger.connect(str(path))
                stranger.sendall(sent)
                assert hung_up(stranger), what
    await until(lambda: started.logged(SECRET) >= 2 * len(strangers))
    assert await started.counts.add() == 1
    assert started.logged(SECRET) == 2 * len(strangers), "each once"
    assert not touched.exists()


async def test_half_a_frame_and_silence_hold_nobody_up(started: Started) -> None:
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2 * 20)]
    for stranger, path in zip(strangers, 20 * sockets(started.engine), strict=True):
        stranger.connect(str(path))
        stranger.sendall(framed(started.engine._launcher._token)[:20])
    assert await asyncio.wait_for(started.counts.add(), 20) == 1
    assert started.logged(SECRET) == 0
    for stranger in strangers:
        stranger.close()
    await until(lambda: started.logged(SECRET) == len(strangers))
    assert await started.counts.add() == 2


AS_NOBODY = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
stranger.settimeout(20)
try:
    stranger.connect(sys.argv[1])
    stranger.sendall(bytes.fromhex(sys.argv[2]))
    print("hung up" if stranger.recv(1) == b"" else "answered")
except PermissionError:
    print("kept out")
except (BrokenPipeError, ConnectionResetError):
    print("hung up")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_is_refused_even_with_the_secret(started: Started) -> None:
    greeting = framed(started.engine._launcher._token) + framed(encode(Question(0, "place", None, b"")))
    paths = sockets(started.engine)
    assert {as_nobody(path, greeting) for path in paths} == {"kept out"}
    for path in paths:  # what the server itself looks at, where the folder would let them in
        path.parent.chmod(0o711)
        path.chmod(0o777)
    assert {as_nobody(path, greeting) for path in paths} == {"hung up"}
    await until(lambda: started.logged(f"user {NOBODY} is refused") == 2)
    assert await started.counts.add() == 1


def as_nobody(path: Path, greeting: bytes) -> str:
    """What a process of another user meets there."""
    command = [sys.executable, "-c", AS_NOBODY, str(path), greeting.hex()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
