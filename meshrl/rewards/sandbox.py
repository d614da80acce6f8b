r"""Running code that a model wrote: in a process of its own, under limits, with a typed result.

    result = await run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
    result.outcome      # "passed"

The limits keep the mistakes and the mischief of a model in training from the trainer. They are no wall against somebody
who knows the kernel; code from elsewhere belongs in a container or a virtual machine. `enforced()` says what holds.
"""

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from pydantic import Field

from meshrl import log
from meshrl.config import Config

Outcome: TypeAlias = Literal["passed", "failed", "timeout", "memory", "error"]
"""All tests held; the code or a test raised, or the code ended the process; its time was up; its memory was; or the
sandbox itself could not work, which is not the code's fault."""


class Limits(Config):
    """What code may use."""

    seconds: float = Field(default=5.0, gt=0)
    """Of the clock; and as many of a CPU, rounded up, for each process."""
    memory_mib: int = Field(default=512, gt=0)
    """Of address space, for each process."""
    processes: int = Field(default=16, gt=0)
    """Processes and threads at once."""
    output_bytes: int = Field(default=65536, gt=0)
    """Kept of what it prints. Each file that it writes, and what it prints, ends at sixteen times as much."""


@dataclass(frozen=True)
class Result:
    """What became of code and its tests."""

    outcome: Outcome
    output: str
    """What it printed, with the traceback where it raised; the first `Limits.output_bytes`."""
    seconds: float
    """Of the clock, with the start of the process."""


@dataclass(frozen=True)
class Enforced:
    """What this machine lets a sandbox enforce, beside time, memory and output."""

    prefix: tuple[str, ...]
    """The command that makes the namespaces; empty where there are none."""

    @property
    def network(self) -> bool:
        """Whether the code has no network."""
        return bool(self.prefix)

    @property
    def processes(self) -> bool:
        """Whether all of its processes end with it, also those that left its session, and are counted apart."""
        return bool(self.prefix)


_POOL: Final = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "meshrl-sandbox")
"""As many sandboxes at once."""
_SPACES: Final = ("--net", "--pid", "--fork", "--kill-child")
_CHILD: Final = str(Path(__file__).with_name("sandbox_worker.py"))
_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FIRST_UID: Final = 1 << 30
"""Users that nobody is: as root, each sandbox is another one, whose processes are counted apart."""


@cache
def enforced() -> Enforced:
    """What holds here, tried once in a process; told in the log where it is not all."""
    unshare = shutil.which("unshare")
    ways = ((), ("--user", "--map-current-user")) if os.getuid() == 0 else (("--user", "--map-current-user"),)
    for way in ways if unshare else ():
        prefix = (str(unshare), *way, *_SPACES)
        with suppress(OSError, subprocess.TimeoutExpired):
            tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False)  # noqa: S603
            if tried.returncode == 0:
                return Enforced(prefix)
    log.warning(
        "the sandbox cannot make namespaces here: the code of a model has this machine's network, and a process that "
        "leaves its session outlives it; run the reward's mesh in a container without a network"
    )
    return Enforced(())


@cache
def _is_python_for_all() -> bool:
    """Whether every user can read the libraries of this Python."""
    files = (Path(os.__file__).resolve(), Path(sys.executable).resolve(), Path(json.__file__).resolve())
    return all(each.stat().st_mode & 0o4 and all(up.stat().st_mode & 0o1 for up in each.parents) for each in files)


def code_of(completion: str) -> str:
    """The first block of Python between fences, or the whole text where there is none."""
    found = _BLOCK.search(completion)
    return found[1] if found else completion


async def run_tests(code: str, tests: Sequence[str], limits: Limits | None = None) -> Result:
    """Run code and then each test, Python with `assert`, in the same names."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, _run, code, list(tests), limits or Limits())


async def code_tests(prompt: str, completion: str, row: Mapping[str, object]) -> float:  # noqa: ARG001 -- a reward's
    """1.0 where the completion's code passes `tests` of the row, Python with `assert`: a text, or a list of them."""
    tests = row.get("tests")
    listed = [tests] if isinstance(tests, str) else tests
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(test, str) for test in cast("list[object]", listed))
    ):
        raise ValueError(f"the row has no `tests` to run: Python with assert, a text or a list of them, not {tests!r}")
    result = await run_tests(code_of(completion), cast("list[str]", listed))
    if result.outcome == "error":
        raise RuntimeError(f"the sandbox did not work: {result.output[-400:]}")
    return float(result.outcome == "passed")


def _run(code: str, tests: list[str], limits: Limits) -> Result:
    began, holds, secret = time.monotonic(), enforced(), secrets.token_hex(16)
    uid = _FIRST_UID + secrets.randbelow(1 << 29) if os.getuid() == 0 and "--user" not in holds.prefix else 0
    with tempfile.TemporaryDirectory(prefix="meshrl-sandbox-", ignore_cleanup_errors=True) as folder:
        inside = Path(folder) / "work"
        inside.mkdir()
        if uid:
            os.chown(inside, uid, uid)
            Path(folder).chmod(0o711)
        told, printed = inside / f"result-{secret[:8]}", Path(folder) / "output"
        job = {
            "code": code,
            "tests": tests,
            "result": str(told),
            "secret": secret,
            "uid": uid,
            "reads": not _is_python_for_all(),
            "own_count": bool(uid or "--user" in holds.prefix),
            "seconds": limits.seconds,
            "memory": limits.memory_mib << 20,
            "processes": limits.processes,
            "file_bytes": 16 * limits.output_bytes,
        }
        code_or_none = _spawn((*holds.prefix, sys.executable, "-I", "-B", _CHILD), job, inside, printed, limits)
        with printed.open("rb") as output:
            text = output.read(limits.output_bytes).decode("utf-8", "replace")
        return Result(_outcome(code_or_none, told, secret, text), text, time.monotonic() - began)


def _spawn(command: Sequence[str], job: object, inside: Path, printed: Path, limits: Limits) -> int | None:
    """The exit code, or None where its time was up; nothing of it runs any more."""
    environment = {"HOME": str(inside), "TMPDIR": str(inside), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with printed.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 -- our own script
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=inside,
            env=environment,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=limits.seconds + _START)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def _outcome(code: int | None, told: Path, secret: str, text: str) -> Outcome:
    if code is None or code == 128 + signal.SIGXCPU:
        return "timeout"
    with suppress(OSError, ValueError):
        found: object = json.loads(told.read_text("utf-8"))
        if isinstance(found, list) and len(cast("list[object]", found)) == 2 and found[0] == secret:
            return cast("Outcome", found[1])
    if "MemoryError" in text:
        return "memory"
    return "failed" if code > 128 else "error"


_START: Final = 1.0
"""Seconds that the process itself may take to start."""
