"""The inside of a sandbox: a script that runs a job from standard input, under limits. See `rewards.sandbox`.

The first process gives up what rights it has, starts a second one that runs the code, and waits for it: orphans come to
it, and it takes them all with it when it ends.
"""

import json
import math
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypedDict

if TYPE_CHECKING:
    from meshrl.rewards import sandbox_kernel as kernel
else:  # a script, in which importing meshrl would take longer than most jobs
    _found = spec_from_file_location("sandbox_kernel", Path(__file__).with_name("sandbox_kernel.py"))
    kernel = module_from_spec(_found)
    _found.loader.exec_module(kernel)

_READ_SEARCH = 2
"""CAP_DAC_READ_SEARCH of capabilities(7)."""
_SHARED = "/dev/shm"  # noqa: S108 -- it is named, to be hidden
_OPEN_FILES = 256
_READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", sys.prefix, sys.base_prefix, sys.exec_prefix),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives"),
    *("/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)
"""What Python and its packages read."""
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")


class Job(TypedDict):
    """What is to be run."""

    code: str
    tests: list[str]
    result: int
    """The pipe that the outcome is written to."""
    secret: str
    """What is written before it, so that the code cannot tell an outcome of its own."""
    uid: int
    """The user to become where this one is root; 0 to stay."""
    reads: bool
    """Whether that user may read every file all the same: where Python's own are not for everybody."""
    spaces: bool
    """Whether this process has namespaces of its own, for processes, mounts, the network and shared memory."""
    own_count: bool
    """Whether this user's processes are counted for this sandbox alone."""
    hidden: list[str]
    """Folders of the machine to put an empty one over; only with `spaces`."""
    timeout: float
    memory: int
    processes: int
    file_bytes: int
    """Of one file."""
    files: int
    """Bytes of all files, with `spaces`."""


def main() -> NoReturn:
    """Run the job; ends with 128, the signal that ended the code, or 72 where none did, added to it."""
    job: Job = json.loads(sys.stdin.buffer.read())
    here, uid = Path.cwd(), job["uid"] or os.getuid()
    if job["spaces"]:
        for folder in (*filter(os.path.isdir, job["hidden"]), str(here)):
            here.mkdir(parents=True, exist_ok=True)  # it may be in one of those
            kernel.mount_memory(folder, job["files"], uid)
        os.chdir(here)
    kernel.become(job["uid"], _READ_SEARCH if job["reads"] else -1)
    kernel.hide()
    kernel.end_with_parent()  # which another user's id has cleared
    kernel.adopt_orphans()
    worker = os.fork()
    if not worker:
        run(job, here)
    signal.signal(signal.SIGTERM, lambda *_: _end(worker, -signal.SIGKILL))
    done, status = os.wait()
    while done != worker:
        done, status = os.wait()
    _end(worker, os.waitstatus_to_exitcode(status))


def _end(worker: int, code: int) -> NoReturn:
    """End every descendant, then this process; the first of a process namespace takes all with it."""
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.getpid() != 1:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.wait()
    os._exit(128 + (72 if code >= 0 else -code))


def _children() -> list[int]:
    """Processes whose parent is this one, dead ones too."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((process / "stat").read_text("utf-8").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(process.name))
    return found


def run(job: Job, here: Path) -> NoReturn:
    """Run the code, then its tests, and write what became of them."""
    counted = 0 if job["own_count"] else _running()
    cpu = math.ceil(job["timeout"])
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, job["memory"], job["memory"]),
        (resource.RLIMIT_NPROC, counted + job["processes"], counted + job["processes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"], job["file_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        allowed = [limit if most == resource.RLIM_INFINITY else min(limit, most) for limit in (soft, hard)]
        resource.setrlimit(kind, (allowed[0], allowed[1]))
    shared = (_SHARED,) if job["spaces"] else ()
    kernel.confine(_READABLE, (*_WRITABLE, *shared, str(here)), own_processes=job["spaces"])
    outcome = "failed"
    try:
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(job["code"], "<code>", "exec"), names)  # noqa: S102 -- it is what a sandbox is for
        for number, test in enumerate(job["tests"]):
            exec(compile(test, f"<test {number}>", "exec"), names)  # noqa: S102
        outcome = "passed"
    except MemoryError:
        outcome = "memory"
    except BaseException:  # noqa: BLE001 -- the code may raise anything, and SystemExit before its tests is no success
        traceback.print_exc()
    try:
        os.write(job["result"], f"{job['secret']} {outcome}".encode())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _running() -> int:
    """Threads of this user now."""
    mine = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine += len(list((process / "task").iterdir())) if process.stat().st_uid == os.getuid() else 0
        except OSError:
            continue  # it has ended
    return mine


if __name__ == "__main__":
    main()
