"""Whoever comes to a rank's socket without the run's secret, or as another user: refused, logged, nothing else."""

import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from meshrl import Actor, Mesh, endpoint
from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import Same
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
    counts: Counts
    sockets: list[Path]
    logs: Path

    def logged(self, words: str) -> int:
        return sum(log.read_text().count(words) for log in self.logs.iterdir())


@pytest.fixture
async def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Started]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        Path(folder).chmod(0o711)
        engine = ProcessEngine()
        counts = await (await Mesh.reserve(engine, 2, NO_CORE, "main", str(tmp_path / "logs"))).spawn(Counts)
        sockets = [path for path in Path(folder).glob("*/*") if path.is_socket()]
        assert len(sockets) == 2
        yield Started(counts, sockets, tmp_path / "logs")
        await engine.close()


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


def hung_up(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


async def test_who_lacks_the_secret_is_refused_logged_and_holds_nobody_up(started: Started, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    question = framed(pickle.dumps(Touches(touched)))
    strangers = {
        "random bytes": Random(0).randbytes(5000),
        "a wrong secret": framed(b"x" * 32) + question,
        "a short secret": framed(b"") + question,
        "no secret": question,
        "4 GiB": b"\xff" * 4 + b"x" * 100,
    }
    for path in started.sockets:
        for what, sent in strangers.items():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(str(path))
                stranger.sendall(sent)
                assert hung_up(stranger), what
    refused = 2 * len(strangers)
    await until(lambda: started.logged(SECRET) >= refused)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2 * 20)]
    for stranger, path in zip(silent, 20 * started.sockets, strict=True):
        stranger.connect(str(path))
        stranger.sendall(framed(b"x" * 32)[:20])  # half a frame
    assert await started.counts.add() == 1
    assert started.logged(SECRET) == refused, "each once"
    for stranger in silent:
        stranger.close()
    await until(lambda: started.logged(SECRET) == refused + len(silent))
    assert await started.counts.add() == 2
    assert not touched.exists()


AS_NOBODY = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    stranger.connect(sys.argv[1])
    stranger.shutdown(socket.SHUT_WR)
    print("hung up" if stranger.recv(1) == b"" else "answered")
except PermissionError:
    print("kept out")
except (BrokenPipeError, ConnectionResetError):
    print("hung up")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_is_refused_before_a_secret_is_heard(started: Started) -> None:
    assert {as_nobody(path) for path in started.sockets} == {"kept out"}
    for path in started.sockets:  # what the server itself looks at, where the folder would let them in
        path.parent.chmod(0o711)
        path.chmod(0o777)
    assert {as_nobody(path) for path in started.sockets} == {"hung up"}
    await until(lambda: started.logged("is refused") >= 2)
    assert started.logged(f"user {NOBODY} is refused") == 2
    assert await started.counts.add() == 1


def as_nobody(path: Path) -> str:
    command = [sys.executable, "-c", AS_NOBODY, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
