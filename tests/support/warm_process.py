"""A process with torch, transformers and the backends imported, which forks others on demand.

`python -m tests.support.warm_process FD`. An order on the socket FD is a JSON object with the fields of `Start`, sent
with these open files: the three standard ones, those that the process keeps, and a pipe for its wait status. The answer
is its process id. It ends when the socket is closed.
"""

import atexit
import ctypes
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import numpy as np

MODULES = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.generation.utils", "accelerate", "peft", "meshrl_torch.train.fsdp", "meshrl_http",
    "meshrl_megatron", "meshrl.tasks.user_worker",
)  # fmt: skip
"""What engines of tests import again and again. One that is not installed is left out."""
LARGEST = 1 << 20


class Start(TypedDict):
    """What a process is: as `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    new_session: bool


def serve(control: socket.socket) -> Start | None:
    """Fork a process for each order. Returns its order in the forked process, and None once the socket is closed."""
    news, bell = socket.socketpair()
    for each in (news, bell):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(bell.fileno())
    reports: dict[int, int] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(news, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is news:
                    news.recv(LARGEST)
                    _report_ends(reports)
                    continue
                message, files, _, _ = socket.recv_fds(control, LARGEST, 64)
                if not message:
                    return None
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    order: Start = json.loads(message)
                    _take_files([0, 1, 2, *order["files"]], files[:-1])
                    return order
                reports[pid] = files.pop()
                for file in files:
                    os.close(file)
                control.send(str(pid).encode())


def _report_ends(reports: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            report = reports.pop(ended[0])
            with suppress(BrokenPipeError):
                os.write(report, str(ended[1]).encode())
            os.close(report)


def _take_files(wanted: list[int], files: list[int]) -> None:
    """Give received files their numbers, and close all others."""
    above = max([*wanted, *files]) + 1
    moved = [os.dup2(each, above + place, inheritable=False) for place, each in enumerate(files)]
    for number, each in zip(wanted, moved, strict=True):
        os.dup2(each, number)
    for each in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        if each not in wanted:
            with suppress(OSError):  # the one that listed them
                os.close(each)


class Forked(BaseException):
    """Leaves a supervisor, in the process that was forked in place of the command `python -c CODE ARGUMENTS...`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def fork_command(name: str, command: list[str], environment: object, **options: object) -> int:
    """Do what `os.posix_spawnp` does for a supervisor, by a fork."""
    if pid := os.fork():
        return pid
    os.setsid()
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which an exec sets anew
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the one that listed them
            if not os.get_inheritable(each):
                os.close(each)
    sys.argv[:] = ["-c", *command[3:]]
    raise Forked(command[2])


def become(order: Start, own_paths: list[str]) -> None:
    """Run the module, as an interpreter of its own would."""
    if order["new_session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    paths = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys([order["folder"], *filter(None, paths), *own_paths]))
    sys.argv[:] = [order["module"], *order["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=os.isatty(stream.fileno()))  # type: ignore[union-attr]
    if "sitecustomize" in sys.modules and order["environment"].get("COUNTED_TESTS"):
        sys.modules["sitecustomize"].note("engine")
    status = 1
    try:
        if order["module"] == "meshrl.supervisor":
            os.posix_spawnp = fork_command  # type: ignore[assignment]
        try:
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        except Forked as forked:
            random.seed()
            np.random.seed()  # noqa: NPY002 -- as of a process that was just started
            sys.modules["__main__"] = ModuleType("__main__")
            exec(forked.code, vars(sys.modules["__main__"]))  # noqa: S102 -- as `python -c` does
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 -- an interpreter prints it
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # taking apart what was imported takes a second


def main() -> None:
    """Import, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        with suppress(ModuleNotFoundError):
            import_module(module)
    foreign = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own_paths = [path for path in sys.path if path and path not in foreign]
    gc.freeze()  # else each collection of a forked process copies the memory of all that was imported
    order = serve(control)
    if order is not None:
        become(order, own_paths)


if __name__ == "__main__":
    main()
