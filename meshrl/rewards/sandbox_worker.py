"""The inside of a sandbox: a script that runs a job from its standard input, under limits. See `rewards.sandbox`.

The first process gives up what rights it has, starts a second one that runs the code, and waits for it: as the first of
its process namespace, where there is one, it takes all others with it when it ends.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn, TypedDict

_PDEATHSIG, _KEEPCAPS, _AMBIENT, _RAISE = 1, 8, 47, 2
"""Of prctl(2)."""
_CAPABILITIES, _READ_SEARCH = 0x20080522, 2
"""Of capabilities(7): the version of the calls, and CAP_DAC_READ_SEARCH."""


class Job(TypedDict):
    """What is to be run."""

    code: str
    tests: list[str]
    result: str
    """The file that the outcome is written to."""
    secret: str
    """What stands in it, so that the code cannot tell an outcome of its own."""
    uid: int
    """The user to become where this one is root; 0 to stay."""
    reads: bool
    """Whether that user may read every file all the same: where Python's own are not for everybody."""
    own_count: bool
    """Whether this user's processes are counted for this sandbox alone."""
    seconds: float
    memory: int
    processes: int
    file_bytes: int


def main() -> NoReturn:
    """Run the job; ends with 128, the signal that ended the code, or 72 where none did, added to it."""
    job: Job = json.loads(sys.stdin.buffer.read())
    libc = ctypes.CDLL(None, use_errno=True)
    if job["uid"]:
        libc.prctl(_KEEPCAPS, int(job["reads"]), 0, 0, 0)
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
        if job["reads"]:
            only = 1 << _READ_SEARCH
            header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
            if libc.capset(header, (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0)):
                raise OSError(ctypes.get_errno(), "capset")
            libc.prctl(_AMBIENT, _RAISE, _READ_SEARCH, 0, 0)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # which another user's id has cleared
    worker = os.fork()
    if not worker:
        run(job)
    done, status = os.wait()
    while done != worker:  # orphans come to the first process
        done, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 + (72 if code >= 0 else -code))


def run(job: Job) -> NoReturn:
    """Run the code, then its tests, and write what became of them."""
    counted = 0 if job["own_count"] else _running()
    cpu = math.ceil(job["seconds"])
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, job["memory"], job["memory"]),
        (resource.RLIMIT_NPROC, counted + job["processes"], counted + job["processes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"], job["file_bytes"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        allowed = [limit if most == resource.RLIM_INFINITY else min(limit, most) for limit in (soft, hard)]
        resource.setrlimit(kind, (allowed[0], allowed[1]))
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
        Path(job["result"]).write_text(json.dumps([job["secret"], outcome]), "utf-8")
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
