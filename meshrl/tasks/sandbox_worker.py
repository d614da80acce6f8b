"""The inside of a sandbox: a script that runs a job from standard input, or command by command. See `sandbox.py`.

The first process gives up its rights, starts a second one that runs the code, and waits for it. The supervisor of both
ends what they leave. Landlock limits the files that they may use, and seccomp their system calls. Both need no
privileges, apply to all processes that are started then, and cannot be undone. This script imports no meshrl, which
would take longer than most jobs.
"""

import ctypes
import json
import math
import os
import platform
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import_module("importlib.util")  # code uses it after `import importlib` alone

_KEEP_CAPS, _NO_NEW_PRIVS, _AMBIENT, _DUMPABLE, _SECCOMP = 8, 38, 47, 4, 22
"""Constants of prctl(2)."""
_CAPABILITIES: Final = 0x20080522
"""The version of the call, from capabilities(7)."""
_LANDLOCK: Final = (444, 445, 446)
"""landlock_create_ruleset, landlock_add_rule, landlock_restrict_self: the same numbers on every architecture."""
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
"""Rights of landlock(7)."""
_OF_A_FILE: Final = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_SIGNALS_AND_SOCKETS: Final = 3
_ARCHITECTURES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Architectures of seccomp(2), each with the index of its number in `_FORBIDDEN`."""

_FORBIDDEN: Final = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "unshare": (272, 97), "setns": (308, 268),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "socket": (41, 198), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
"""Calls that reach into other processes, or leave something that outlives this one: numbers on x86_64 and aarch64."""
_SIGNALS: Final = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
"""Calls that reach any process of the same user."""
_CLONE, _CLONE3, _PRLIMIT, _TGKILL = (56, 220), (435, 435), (302, 261), (234, 131)
_NEW_SPACES: Final = 0x7E020000
"""The flags of clone(2) for new namespaces."""


def architecture() -> tuple[int, int] | None:
    """Return the number of this processor's architecture, and its index in tables of calls. None if unknown."""
    return _ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None


def landlock_version() -> int:
    """Return the version of the kernel's Landlock. 0 if it has none."""
    return max(0, _libc().syscall(_LANDLOCK[0], None, 0, 1)) if sys.platform == "linux" else 0


def hide() -> None:
    """Prevent other processes of this user from reading this one's memory or environment."""
    _prctl(_DUMPABLE, 0)


def become(uid: int, kept: int) -> None:
    """Become another user, or stay with 0. Of root's capabilities, keep only this one, or none with -1."""
    if uid:
        _prctl(_KEEP_CAPS, int(kept >= 0))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_AMBIENT, 4)  # clear all
    only = 1 << kept if kept >= 0 else 0
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    _checked(_libc().capset(header, (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0)), "capset")
    if kept >= 0:
        _prctl(_AMBIENT, 2, kept)


def mount_memory(folder: str, size: int, uid: int) -> None:
    """Mount an in-memory file system of `size` bytes on a folder, in this process's mount namespace."""
    options = f"size={size},nr_inodes={max(64, size >> 12)},mode=0700,uid={uid},gid={uid}".encode()
    no_devices_no_setuid = 6
    _checked(_libc().mount(b"tmpfs", folder.encode(), b"tmpfs", no_devices_no_setuid, options), f"mount {folder}")


def confine(reads: Iterable[str], writes: Iterable[str], *, own_processes: bool) -> None:
    """Limit this process and its children to these files, no socket, and no call into other processes.

    `own_processes`: it has a process namespace, so its signals reach only its own processes. Without Landlock (see
    `landlock_version`), all files of the user stay accessible.
    """
    _prctl(_NO_NEW_PRIVS, 1)
    version = landlock_version()
    if version:
        _confine_files(version, reads, writes)
    found = architecture()
    if found:
        number, place = found
        _filter(_program(number, place, anyone=own_processes or version >= 6))


def _confine_files(version: int, reads: Iterable[str], writes: Iterable[str]) -> None:
    every = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
    attributes = struct.pack("QQQ", every, 3 if version >= 4 else 0, _SIGNALS_AND_SOCKETS if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _checked(_libc().syscall(_LANDLOCK[0], attributes, size, 0), "landlock_create_ruleset")
    for paths, rights in ((reads, _EXECUTE | _READ | _LIST), (writes, every)):
        for path in filter(os.path.exists, paths):
            allowed = rights & every if Path(path).is_dir() else rights & every & _OF_A_FILE
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", allowed, descriptor)
            _checked(_libc().syscall(_LANDLOCK[1], rules, 1, rule, 0), f"landlock_add_rule {path}")
            os.close(descriptor)
    _checked(_libc().syscall(_LANDLOCK[2], rules, 0), "landlock_restrict_self")
    os.close(rules)


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Codes of BPF: load a word, jump if equal, at least, or has a bit of, and return."""
_ALLOW, _KILL, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
"""Results of seccomp(2): allow, end the process, EPERM, ENOSYS (so that glibc takes the older call)."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def _program(architecture: int, place: int, *, anyone: bool) -> Sequence[tuple[int, int, int, int]]:
    """Make BPF instructions: code, how many to skip if it holds and if not, and a number."""
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # x86_64's second set of numbers
        (_RETURN, 0, 0, _REFUSE),
        (_EQUAL, 0, 1, _CLONE3[place]),  # its flags are in memory, which a filter cannot read
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    calls = [numbers[place] for numbers in _FORBIDDEN.values()]
    own = os.getpid()
    if not anyone:
        calls += [numbers[place] for numbers in _SIGNALS.values()]
    for call in calls:
        lines += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _REFUSE)]
    lines += _by_first_argument(_CLONE[place], (_ANY_BIT, 0, 1, _NEW_SPACES), refused_where=True)
    lines += _by_first_argument(_PRLIMIT[place], (_EQUAL, 0, 1, 0), refused_where=False)
    if not anyone:
        lines += _by_first_argument(_TGKILL[place], (_EQUAL, 0, 1, own), refused_where=False)
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _by_first_argument(
    call: int, test: tuple[int, int, int, int], *, refused_where: bool
) -> list[tuple[int, int, int, int]]:
    """Allow or refuse a call by its first argument."""
    held, not_held = (_REFUSE, _ALLOW) if refused_where else (_ALLOW, _REFUSE)
    return [
        (_EQUAL, 0, 4, call),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        test,
        (_RETURN, 0, 0, held),
        (_RETURN, 0, 0, not_held),
    ]


def _filter(program: Sequence[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    _prctl(_SECCOMP, 2, ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))))


def _prctl(what: int, *values: object) -> None:
    given = [each if isinstance(each, ctypes.Array) else ctypes.c_ulong(int(str(each))) for each in values]
    zeros = [ctypes.c_ulong(0)] * (4 - len(given))
    _checked(_libc().prctl(what, *given, *zeros), f"prctl {what}")


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_READ_SEARCH = 2
"""CAP_DAC_READ_SEARCH of capabilities(7)."""
_SHARED = "/dev/shm"  # noqa: S108 -- named to hide it
_OPEN_FILES = 256
_LOOK = 60.0
"""Seconds between two looks at a command."""
_READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", sys.prefix, sys.base_prefix, sys.exec_prefix),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives"),
    *("/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)
"""Files that Python and its packages read."""
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")


def main() -> NoReturn:
    """Run a job of `sandbox.py`. The exit code is 128 plus the signal that ended the code, or plus 72 if none did."""
    job = json.loads(sys.stdin.buffer.readline())
    here, uid = Path.cwd(), job["uid"] or os.getuid()
    if job["spaces"]:
        for folder in (*(each for each in job["hidden"] if os.path.isdir(each)), str(here)):  # noqa: PTH112 -- no error
            here.mkdir(parents=True, exist_ok=True)  # it may be in one of those
            mount_memory(folder, job["files"], uid)
        os.chdir(here)
    become(job["uid"], _READ_SEARCH if job["reads"] else -1)
    hide()
    if "code" not in job:
        _serve(job, here)
    worker = os.fork()
    if not worker:
        _run(job, here)
    done, status = os.wait()
    while done != worker:
        done, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 + (72 if code >= 0 else -code))


def _run(job: dict[str, Any], here: Path) -> NoReturn:
    """Run the code, then its tests, and report the outcome: `error` if there was no room to begin."""
    outcome = "error"
    try:
        _limit(job, here)
        outcome = "failed"
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


def _serve(job: dict[str, Any], here: Path) -> NoReturn:
    """Run commands one by one, until the input ends. What one leaves running continues during the next.

    Each is a line of JSON, followed by its standard input. Its answer is a line too, followed by the end of its output.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))  # `_waited` takes it
    os.write(1, b"ready\n")
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        given, printed = os.memfd_create("stdin"), os.memfd_create("output")
        os.write(given, sys.stdin.buffer.read(request["given"]))
        os.lseek(given, 0, os.SEEK_SET)
        _reap(0)
        child = os.fork()
        if not child:
            cpu = min(request["seconds"] * (os.cpu_count() or 1), 1 << 31)  # it may use all cores all the time
            _become_command(job | {"timeout": cpu}, here, request["command"], given, printed)
        status = _waited(child, request["seconds"])
        size = os.fstat(printed).st_size
        most = min(request["most"], size)
        kept = os.pread(printed, most, size - most)
        os.close(given)
        os.close(printed)
        answer = json.dumps({"status": status, "size": size, "kept": len(kept)})
        sys.stdout.buffer.write(answer.encode() + b"\n" + kept)
        sys.stdout.buffer.flush()
    os._exit(0)


def _become_command(job: dict[str, Any], here: Path, command: list[str], given: int, printed: int) -> NoReturn:
    """Confine this process, and become the command. 127 if there is none, as a shell has it."""
    try:
        os.setsid()
        for stream, target in ((given, 0), (printed, 1), (printed, 2)):
            os.dup2(stream, target)
        os.closerange(3, _OPEN_FILES)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _limit(job, here)
        os.execvp(command[0], command)  # noqa: S606 -- confined by now
    except BaseException as error:  # noqa: BLE001 -- it must not return into the loop of its parent
        os.write(2, f"{command[0][:100]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _waited(child: int, seconds: float) -> int | None:
    """Wait for a child, and kill its session after these seconds. Returns its status, None if it took too long."""
    until, status = time.monotonic() + seconds, _reap(child)
    while status is None and (left := until - time.monotonic()) > 0:
        signal.sigtimedwait((signal.SIGCHLD,), min(left, _LOOK))
        status = _reap(child)
    if status is None:
        for kill in (os.killpg, os.kill):  # it may not have its session yet
            with suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _reap(child: int) -> int | None:
    """Reap all that has ended, as the first process of a namespace has to. Returns the wait status of this child."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def _limit(job: dict[str, Any], here: Path) -> None:
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
    confine(_READABLE, (*_WRITABLE, *shared, str(here)), own_processes=job["spaces"])


def _running() -> int:
    """Return the number of this user's threads."""
    mine = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            mine += len(list((process / "task").iterdir())) if process.stat().st_uid == os.getuid() else 0
    return mine


if __name__ == "__main__":
    main()
