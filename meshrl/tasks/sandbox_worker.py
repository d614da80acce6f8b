"""The inside of a sandbox: a script that runs a job from standard input, under limits. See `sandbox.py`.

The first process gives up its rights, starts a second one that runs the code, and waits for it. It adopts orphans, and
ends all of them at its end.
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
    from meshrl.tasks import sandbox_kernel as kernel
else:  # as a script, because importing meshrl takes longer than most jobs
    _found = spec_from_file_location("sandbox_kernel", Path(__file__).with_name("sandbox_kernel.py"))
    kernel = module_from_spec(_found)
    _found.loader.exec_module(kernel)

_READ_SEARCH = 2
"""CAP_DAC_READ_SEARCH of capabilities(7)."""
_SHARED = "/dev/shm"  # noqa: S108 -- named to hide it
_OPEN_FILES = 256
_READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", sys.prefix, sys.base_prefix, sys.exec_prefix),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives"),
    *("/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)
"""Files that Python and its packages read."""
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")


class Job(TypedDict):
    """The job to run."""

    code: str
    tests: list[str]
    result: int
    """The pipe for the outcome."""
    secret: str
    """Precedes the outcome, so that the code cannot report its own."""
    uid: int
    """The user to become if this process is root. 0: stay."""
    reads: bool
    """True if that user may still read every file, because not everybody can read Python's own."""
    spaces: bool
    """True if this process has namespaces for processes, mounts, the network and shared memory."""
    own_count: bool
    """True if this user's processes are counted for this sandbox alone."""
    hidden: list[str]
    """Folders of the machine to hide under empty ones. Only with `spaces`."""
    timeout: float
    memory: int
    processes: int
    file_bytes: int
    """Bytes of one file."""
    files: int
    """Bytes of all files, with `spaces`."""


def main() -> NoReturn:
    """Run the job. The exit code is 128 plus the signal that ended the code, or plus 72 if there was none."""
    job: Job = json.loads(sys.stdin.buffer.read())
    here, uid = Path.cwd(), job["uid"] or os.getuid()
    if job["spaces"]:
        for folder in (*filter(os.path.isdir, job["hidden"]), str(here)):
            here.mkdir(parents=True, exist_ok=True)  # it may be in one of those
            kernel.mount_memory(folder, job["files"], uid)
        os.chdir(here)
    kernel.become(job["uid"], _READ_SEARCH if job["reads"] else -1)
    kernel.hide()
    kernel.end_with_parent()  # another user's id has cleared it
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
    """End every descendant, then this process. If it is first in a process namespace, the kernel ends the others."""
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.getpid() != 1:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.wait()
    os._exit(128 + (72 if code >= 0 else -code))


def _children() -> list[int]:
    """List the children of this process, dead ones included."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((process / "stat").read_text("utf-8").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(process.name))
    return found


def run(job: Job, here: Path) -> NoReturn:
    """Run the code, then its tests, and report the outcome."""
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
        exec(compile(job["code"], "<code>", "exec"), names)  # noqa: S102 -- this is the purpose of a sandbox
        for number, test in enumerate(job["tests"]):
            exec(compile(test, f"<test {number}>", "exec"), names)  # noqa: S102
        outcome = "passed"
    except MemoryError:
        outcome = "memory"
    except BaseException:  # noqa: BLE001 -- the code may raise anything, and SystemExit before its tests is not a success
        traceback.print_exc()
    try:
        os.write(job["result"], f"{job['secret']} {outcome}".encode())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _running() -> int:
    """Return the number of this user's threads."""
    mine = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine += len(list((process / "task").iterdir())) if process.stat().st_uid == os.getuid() else 0
        except OSError:
            continue  # it has ended
    return mine


if __name__ == "__main__":
    main()
