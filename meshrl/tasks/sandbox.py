r"""Run code that a model wrote, in a separate process with limits and a typed result.

    result = await run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
    result.outcome      # "passed"

The limits protect the trainer from mistakes and mischief of a model in training. They do not stop an attacker with a
hole in the kernel: run code from elsewhere in a container or a virtual machine. `enforced()` returns the limits that
hold on this machine.
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
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from pydantic import Field

from meshrl import log
from meshrl.config import Config
from meshrl.errors import ConfigError, MachineFault
from meshrl.supervisor import supervised
from meshrl.tasks import sandbox_worker

Outcome: TypeAlias = Literal["passed", "failed", "timeout", "memory", "error"]
"""`passed`: all tests held. `failed`: the code or a test raised, or ended the process. `timeout`, `memory`: a limit was
reached. `error`: the sandbox itself failed, through no fault of the code."""


class Limits(Config):
    """Limits of the resources that code may use."""

    timeout: float = Field(default=5.0, gt=0)
    """Seconds of wall time. Each process gets as many seconds of CPU time, rounded up."""
    memory_mib: int = Field(default=512, gt=0)
    """MiB of address space of each process."""
    processes: int = Field(default=16, gt=0)
    """Processes and threads at once."""
    output_bytes: int = Field(default=65536, gt=0)
    """Bytes of its output that are kept. Each file that it writes, and its output, is limited to sixteen times this."""
    files_mib: int = Field(default=64, gt=0)
    """MiB of all files together, if the sandbox has namespaces."""


@dataclass(frozen=True)
class Result:
    """The result of code and its tests."""

    outcome: Outcome
    output: str
    """Its output up to `Limits.output_bytes`, with the traceback of an error."""
    seconds: float
    """Seconds of wall time, including the start of the process."""

    def passed(self) -> bool:
        """Return whether all tests held. MachineFault if the sandbox did not work."""
        if self.outcome == "error":
            raise MachineFault(f"the sandbox did not work: {self.output[-400:].strip()}")
        return self.outcome == "passed"


@dataclass(frozen=True)
class Enforced:
    """The limits that a sandbox enforces on this machine, besides time, memory and output."""

    prefix: tuple[str, ...] = ()
    """The command that makes namespaces for processes, mounts, network and shared memory. Empty without them."""
    files: bool = False
    """True if it sees only its own files and Python's, and cannot reach this user's processes: Landlock."""
    calls: bool = False
    """True if it cannot open sockets or call into other processes: seccomp."""
    other_user: bool = False
    """True if it runs as a user that nobody else uses."""

    @property
    def network(self) -> bool:
        """True if the code has no network."""
        return bool(self.prefix) or self.calls

    @property
    def processes(self) -> bool:
        """True if its processes are counted separately from others of the same user."""
        return bool(self.prefix) or self.other_user

    @property
    def safe(self) -> bool:
        """True if the code cannot reach the memory and the environment of the judging process."""
        return self.files or self.calls or self.other_user


_POOL: Final = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "meshrl-sandbox")
"""Runs one sandbox for each core at once."""
_SPACES: Final = ("--net", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
_OWN_USER: Final = ("--user", "--map-current-user", "--keep-caps")
_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 -- named to hide them
_CHILD: Final = str(sandbox_worker.__file__)
_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FIRST_UID: Final = 1 << 30
"""The first of the unused user ids. As root, each sandbox gets another one, so its processes count separately."""
_REPORTED: Final[Sequence[Outcome]] = ("passed", "failed", "memory", "error")
_LONGEST: Final = 256
"""Most bytes of a reported outcome."""
_START: Final = 1.0
"""Seconds that the process may take to start."""


@cache
def enforced() -> Enforced:
    """Return the limits that hold on this machine. It tries them once for each process, and logs missing ones."""
    root = sys.platform == "linux" and os.getuid() == 0
    limits = Enforced(
        _spaces(root), sandbox_worker.landlock_version() > 0, sandbox_worker.architecture() is not None, root
    )
    held = {
        "namespaces (its files are bounded one by one, and processes count with this user's)": limits.prefix,
        "Landlock (it reads this user's files, and writes what others may write)": limits.files,
        "seccomp (it may open sockets and signal this user's processes)": limits.calls or limits.prefix,
    }
    if missing := "; ".join(name for name, is_held in held.items() if not is_held):
        log.warning(f"the sandbox for a model's code must do without {missing}")
    return limits


def _spaces(root: bool) -> tuple[str, ...]:
    """Return the command that makes namespaces here. Empty if none does."""
    unshare = shutil.which("unshare")
    for user in ((), _OWN_USER) if root else (_OWN_USER,) if unshare else ():
        prefix = (str(unshare), *user, *_SPACES)
        with suppress(OSError, subprocess.TimeoutExpired):
            tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False)  # noqa: S603
            if tried.returncode == 0:
                return prefix
    return ()


def check_safe(what: str = "code_tests", instead: str = "set reward.unsafe = true") -> None:
    """Raise ConfigError if nothing keeps a model's code from the memory of the judging process.

    `what`: what would run the code. `instead`: the way out, besides another machine.
    """
    if not enforced().safe:
        raise ConfigError(
            f"{what} runs what a model wrote, and this system has no Landlock, no seccomp and no other user to "
            f"keep it away from your files and processes: run it on Linux or in a separate container, or {instead}"
        )


@cache
def _is_python_for_all() -> bool:
    """True if every user can read the libraries of this Python."""
    files = (Path(os.__file__).resolve(), Path(sys.executable).resolve(), Path(json.__file__).resolve())
    return all(each.stat().st_mode & 0o4 and all(up.stat().st_mode & 0o1 for up in each.parents) for each in files)


def code_of(completion: str) -> str:
    """Return the first fenced block of Python, or the whole text if there is none."""
    block = _BLOCK.search(completion)
    return block[1] if block else completion


async def run_tests(code: str, tests: Sequence[str], limits: Limits | None = None) -> Result:
    """Run code, and then each test in the same namespace. Tests are Python with `assert`."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, run_tests_here, code, tests, limits)


async def code_tests(prompt: str, completion: str, row: Mapping[str, object]) -> float:  # noqa: ARG001 -- a reward's
    """Return 1.0 if the completion's code passes the row's `tests`: Python with `assert`, a text or a list of them.

    Raises ValueError if the row has none, and MachineFault if the sandbox did not work.
    """
    tests = row.get("tests")
    listed = [tests] if isinstance(tests, str) else tests
    are_texts = isinstance(listed, list) and all(isinstance(test, str) for test in cast("list[object]", listed))
    if not are_texts or not listed:
        raise ValueError(f"the row has no `tests` to run: Python with assert, a text or a list of them, not {tests!r}")
    return float((await run_tests(code_of(completion), cast("list[str]", listed))).passed())


def run_tests_here(code: str, tests: Sequence[str], limits: Limits | None = None) -> Result:
    """Run code and tests like `run_tests`, while the calling thread waits."""
    limits = limits or Limits()
    began, secret = time.monotonic(), secrets.token_hex(16)
    read_end, write_end = os.pipe()  # held by the judge, so that code cannot replace it
    try:
        with prepared(limits) as (command, inside, job):
            printed = inside.parent / "output"
            # The secret precedes the outcome, so that the code cannot report its own.
            job |= {"code": code, "tests": list(tests), "result": write_end, "secret": secret}
            exit_code = _spawn(command, job, inside, printed, limits, write_end)
            with printed.open("rb") as output:
                text = output.read(limits.output_bytes).decode("utf-8", "replace")
            outcome, disk = _outcome(exit_code, read_end, secret, text), os.statvfs(inside.parent)
            left = disk.f_bavail if os.geteuid() else disk.f_bfree
            if outcome == "failed" and not enforced().prefix and disk.f_blocks and not left:
                outcome, text = "error", f"{text}\nno space is left in {tempfile.gettempdir()} for what the code writes"
            return Result(outcome, text, time.monotonic() - began)
    finally:
        os.close(read_end)
        os.close(write_end)


@contextmanager
def prepared(limits: Limits) -> Generator[tuple[Sequence[str], Path, dict[str, object]]]:
    """Make the folder of a sandbox, and remove it at the end.

    Gives the command that runs `sandbox_worker.py`, its folder, and the limits that it reads.
    """
    held = enforced()
    other_user = held.other_user and "--user" not in held.prefix
    uid = _FIRST_UID + secrets.randbelow(1 << 29) if other_user else 0
    if not (held.files or other_user):
        sandbox_worker.hide()
    folder = tempfile.mkdtemp(prefix="meshrl-sandbox-")
    try:
        inside = Path(folder) / "work"
        inside.mkdir()
        if uid:
            os.chown(inside, uid, uid)
            Path(folder).chmod(0o711)
        job: dict[str, object] = {
            "uid": uid,  # the user to become, or 0
            "reads": bool(uid) and not _is_python_for_all(),  # that user may still read every file
            "spaces": bool(held.prefix),
            "own_count": bool(uid or held.prefix),  # this user's processes are those of the sandbox alone
            "hidden": ["/dev/shm", *(() if held.files else _without_python(_TEMPORARY))],  # noqa: S108
            "timeout": limits.timeout,
            "memory": limits.memory_mib << 20,
            "processes": limits.processes,
            "file_bytes": 16 * limits.output_bytes,
            "files": limits.files_mib << 20,
        }
        yield (*held.prefix, sys.executable, "-I", "-B", _CHILD), inside, job
    finally:
        _remove(folder)


def _without_python(folders: Sequence[str]) -> list[str]:
    """Return the folders that do not contain Python itself."""
    return [each for each in folders if not any(Path(at).is_relative_to(each) for at in (sys.prefix, sys.base_prefix))]


def _remove(folder: str) -> None:
    """Remove a folder that code has filled, even with unreadable or thousands of nested folders."""
    names, left = count(), [folder]
    while left:
        here = left.pop()
        for entry in list(os.scandir(here)):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                path.chmod(0o700)
                left.append(str(path.rename(Path(folder, f"{next(names)}.gone"))))
            else:
                path.unlink()
        if here != folder:
            Path(here).rmdir()
    Path(folder).rmdir()


def variables(inside: Path) -> Mapping[str, str]:
    """Return the environment of what runs in a sandbox with this folder."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {"HOME": str(inside), "TMPDIR": str(inside), "PATH": path, **threads}


def _spawn(command: Sequence[str], job: object, inside: Path, printed: Path, limits: Limits, pipe: int) -> int | None:
    """Run a process to its end and kill its remains. Returns the exit code, or None after a timeout."""
    with printed.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 -- our own script
            supervised(command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=inside,
            env=variables(inside),
            pass_fds=[pipe],
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=limits.timeout + _START)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()
            process.wait()
    return process.returncode


def _outcome(code: int | None, read_end: int, secret: str, text: str) -> Outcome:
    if code is None or code == 128 + signal.SIGXCPU:
        return "timeout"
    os.set_blocking(read_end, False)  # a process that has left its session may hold the other end
    report = b""
    with suppress(BlockingIOError):
        report = os.read(read_end, _LONGEST)
    for outcome in _REPORTED:
        if report == f"{secret} {outcome}".encode():
            return outcome
    if "MemoryError" in text:
        return "memory"
    return "failed" if code > 128 else "error"
