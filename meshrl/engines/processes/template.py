"""The process that forks ranks: `python -m meshrl.engines.processes.template CONTROL CONTROLLER FOLDER MODULES PATHS`.

It has one thread, and imports once what all ranks need. When its engine ends in any way, it kills the ranks and exits.
If it dies itself, Linux kills them. `CONTROLLER` is the engine's process id. `PATHS` is the PYTHONPATH of ranks and
of the processes that they start. The template itself gets the whole path of the controller.
"""

import asyncio
import ctypes
import faulthandler
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Final

from meshrl.engines.processes.launcher import Begin, Close, Ended, Kill, receive, send
from meshrl.engines.ranks import run_loop
from meshrl.engines.remote import Host, PoolRef, RankLog, Server, work_as
from meshrl.mesh import pool, sweep

_AT_ONCE: Final = 65536
"""Size in bytes of a read, which is the capacity of a pipe."""
_REST: Final = 16
"""Most reads from a rank's pipe after its end, because a process that it started may write forever."""


class RankOutput:
    """The two pipes of a rank. The template reads one end of each."""

    def __init__(self, log: RankLog) -> None:
        """`log`: its folder is closed at the end."""
        self._log = log
        self._reads: dict[int, int] = {}
        """The ends to read, each with the output stream of the rank that it carries."""
        self._writes: dict[int, int] = {}
        for stream in (1, 2):
            read, write = os.pipe()
            self._reads[read], self._writes[write] = stream, stream

    def redirect(self) -> None:
        """Redirect the output, in the rank."""
        for end, stream in self._writes.items():
            os.dup2(end, stream)
        self.close()

    def start_reading(self, pid: int, host: str, ready: selectors.BaseSelector) -> None:
        """Start reading, in the template, once the rank has the other ends."""
        self._log.begin(pid, host)
        for end in self._writes:
            os.close(end)
        self._writes.clear()
        for end in self._reads:
            os.set_blocking(end, False)
            ready.register(end, selectors.EVENT_READ, self)

    def forward(self, end: int, ready: selectors.BaseSelector) -> bool:
        """Pass on what was written. False if there was nothing."""
        if end not in self._reads:  # the rank was just reaped
            return False
        try:
            text = os.read(end, _AT_ONCE)
        except BlockingIOError:
            return False
        if not text:  # no writer is left
            ready.unregister(end)
            os.close(end)
            del self._reads[end]
            return False
        self._log.append(text)
        with suppress(OSError):  # if no reader is left
            while text:
                text = text[os.write(self._reads[end], text) :]
        return True

    def drain(self, ready: selectors.BaseSelector) -> None:
        """Pass on the rest after the rank has ended."""
        for end in list(self._reads):
            for _ in range(_REST):
                if not self.forward(end, ready):
                    break
        for end in self._reads:
            ready.unregister(end)
        self.close()

    def close(self) -> None:
        """Close the ends that are open here."""
        for end in (*self._reads, *self._writes, self._log.folder):
            os.close(end)
        self._reads.clear()
        self._writes.clear()


_NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch asks NVML if there are GPUs. CUDA, once asked, refuses all forks of its process."""
_PR_SET_PDEATHSIG: Final = 1
_PATIENCE: Final = 10.0
"""Seconds to wait for a controller to exit that has closed its end without an order."""


def main() -> None:
    """Obey the engine's orders until it is gone."""
    control, controller = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    folder, modules, paths = sys.argv[3:]
    os.environ["PYTHONPATH"] = paths
    if not paths:
        del os.environ["PYTHONPATH"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # of a file that is a pipe by now
                stream.reconfigure(errors="backslashreplace")  # a locale may lack characters of rows
    own_check = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    for module in modules.split(",") if modules else ():
        with suppress(Exception):  # the rank that needs it reports the error
            import_module(module)
    os.environ.pop(_NVML_CHECK, None)  # the answer for a rank is CUDA's own
    os.environ.update({_NVML_CHECK: own_check} if own_check is not None else {})
    gc.freeze()  # else the first full collection of each rank takes a fraction of a second, and copies these pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles it: it ends the ranks in order
    template = Template(control)
    template.run()
    if not template.was_closed:  # the controller is exiting, and holds its segments until it is gone
        until = time.monotonic() + _PATIENCE
        while os.getppid() == controller and time.monotonic() < until:
            time.sleep(0.01)
    sweep()  # the segments of killed processes
    shutil.rmtree(folder, ignore_errors=True)  # the folder of sockets, if the engine was killed


class Template:
    """Forks ranks, and reaps them."""

    def __init__(self, control: socket.socket) -> None:
        self.was_closed: bool = False
        """True if the engine was closed, and its process continues."""
        self._control = control
        self._ranks: dict[int, str] = {}
        """The key of each process."""
        self._outputs: dict[int, RankOutput] = {}
        self._ready = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        for each in (self._signals, self._wakeup):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno())

    def run(self) -> None:
        """Run until the engine is gone."""
        with self._ready as ready:
            ready.register(self._control, selectors.EVENT_READ)
            ready.register(self._signals, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in ready.select():
                        if isinstance(key.data, RankOutput):
                            key.data.forward(key.fd, ready)
                        elif key.fileobj is self._signals:
                            self._reap()
                        elif not self._obey():
                            return
            except (BrokenPipeError, ConnectionResetError):
                return
            finally:
                self._end()

    def _obey(self) -> bool:
        """Execute the next order. False if there are no more."""
        received = receive(self._control)
        if received is None:
            return False
        order, files = received
        if isinstance(order, Begin):
            try:
                self._fork(order, files[0], RankOutput(RankLog(files[1], order.log)) if order.log else None)
            finally:
                os.close(files[0])
        elif isinstance(order, Kill):
            for pid in [pid for pid, key in self._ranks.items() if key == order.key]:
                _kill(pid)
        self.was_closed = isinstance(order, Close)
        return not self.was_closed

    def _fork(self, order: Begin, listening: int, output: RankOutput | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # if no reader is left
                stream.flush()  # otherwise every rank inherits the buffered text
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(Ended(order.key, f"this machine takes no more processes ({error})"))
            if output:
                output.close()
            return
        with suppress(OSError):  # in both processes, so that neither waits for the other
            os.setpgid(pid, pid or os.getpid())
        if pid:
            self._ranks[pid] = order.key
            if output:
                self._outputs[pid] = output
                output.start_reading(pid, socket.gethostname(), self._ready)
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._control, self._signals, self._wakeup):
                each.close()
            self._ready.close()
            for other in self._outputs.values():
                other.close()
            if output:
                output.redirect()
            faulthandler.enable()
            _become_rank(order, listening, template)
            status = 0
        except BaseException:  # noqa: BLE001 -- nothing else reports it
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._signals.recv(1024):
                pass
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                _kill(pid)
                if output := self._outputs.pop(pid, None):
                    output.drain(self._ready)
                self._report(Ended(self._ranks.pop(pid, ""), _exit_reason(os.waitstatus_to_exitcode(status))))
        sweep()  # their segments; the last reader removes those in use

    def _report(self, ended: Ended) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # its last orders are still to be read
            send(self._control, ended)

    def _end(self) -> None:
        for pid in self._ranks:
            _kill(pid)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass
        for output in self._outputs.values():
            output.drain(self._ready)


def _kill(pid: int) -> None:
    """Kill a rank, and the processes that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # PermissionError on macOS, if all of them have ended
        os.killpg(pid, signal.SIGKILL)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"it ended by itself with status {code}"
    name = signal.Signals(-code).name
    return f"it was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _become_rank(order: Begin, listening: int, template: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a rank is killed at its end, which would lose buffered text
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != template:  # it died before this process asked for the signal
            os._exit(1)
        if order.cores:
            os.sched_setaffinity(0, order.cores)
    work_as(order.folder, order.paths)
    os.environ.update(order.environment)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Python's own is seeded again at each fork
    pool.join(order.share, hands_on=True)
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    host = Host(PoolRef.put, order.inline_bytes, shares_memory=True)

    async def serve() -> None:
        Server(socket.socket(fileno=listening), order.token, host)

    loop.run_until_complete(serve())
    while True:  # a rank outlives a `loop.stop()` in the code of an actor
        run_loop(loop)


if __name__ == "__main__":
    main()
