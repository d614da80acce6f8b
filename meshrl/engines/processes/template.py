"""The process that forks ranks: `python -m meshrl.engines.processes.template CONTROL CONTROLLER FOLDER MODULES PATHS`.

It has one thread, and imports once what all ranks need. When its engine ends in any way, it kills the ranks and exits.
If it dies itself, Linux kills them. `CONTROLLER` is the engine's process id. `PATHS` is the PYTHONPATH of ranks and
of the processes that they start. The template itself gets the whole path of the controller.
"""

import asyncio
import ctypes
import faulthandler
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

from meshrl.engines.hosting import Host, RankLog, work_as
from meshrl.engines.processes.orders import Begin, Close, Ended, Kill, receive, send
from meshrl.engines.processes.outputs import Output
from meshrl.engines.transport import PoolRef, Server
from meshrl.mesh import pool, sweep

_PR_SET_PDEATHSIG: Final = 1
_PATIENCE: Final = 10.0
"""Seconds to wait for a controller to exit that has closed its end without a word."""


def main() -> None:
    """Obey the engine's orders until it is gone."""
    control, controller = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    folder, modules, paths = sys.argv[3:]
    os.environ["PYTHONPATH"] = paths
    if not paths:
        del os.environ["PYTHONPATH"]
    for module in modules.split(",") if modules else ():
        with suppress(Exception):  # the rank that needs it reports the error
            import_module(module)
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
        self._outputs: dict[int, Output] = {}
        self._ready = selectors.DefaultSelector()
        self._news, self._bell = socket.socketpair()
        for each in (self._news, self._bell):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._bell.fileno())

    def run(self) -> None:
        """Run until the engine is gone."""
        with self._ready as ready:
            ready.register(self._control, selectors.EVENT_READ)
            ready.register(self._news, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in ready.select():
                        if isinstance(key.data, Output):
                            key.data.pass_on(key.fd, ready)
                        elif key.fileobj is self._news:
                            self._bury()
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
                self._fork(order, files[0], Output(RankLog(files[1], order.log)) if order.log else None)
            finally:
                os.close(files[0])
        elif isinstance(order, Kill):
            for pid in [pid for pid, key in self._ranks.items() if key == order.key]:
                _kill(pid)
        self.was_closed = isinstance(order, Close)
        return not self.was_closed

    def _fork(self, order: Begin, listening: int, output: Output | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # if no reader is left
                stream.flush()  # otherwise every rank inherits the buffered text
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(Ended(order.key, f"this machine takes no more processes ({error})"))
            if output:
                output.let_go()
            return
        with suppress(OSError):  # in both processes, so that neither waits for the other
            os.setpgid(pid, pid or os.getpid())
        if pid:
            self._ranks[pid] = order.key
            if output:
                self._outputs[pid] = output
                output.begun(pid, socket.gethostname(), self._ready)
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._control, self._news, self._bell):
                each.close()
            self._ready.close()
            for other in self._outputs.values():
                other.let_go()
            if output:
                output.taken()
            faulthandler.enable()
            _become_rank(order, listening, template)
            status = 0
        except BaseException:  # noqa: BLE001 -- nothing else reports it
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _bury(self) -> None:
        with suppress(BlockingIOError):
            while self._news.recv(1024):
                pass
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                _kill(pid)
                if output := self._outputs.pop(pid, None):
                    output.finish(self._ready)
                self._tell(Ended(self._ranks.pop(pid, ""), _how(os.waitstatus_to_exitcode(status))))
        sweep()  # their segments; the last reader removes those in use

    def _tell(self, ended: Ended) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # its last orders are still to be read
            send(self._control, ended)

    def _end(self) -> None:
        for pid in self._ranks:
            _kill(pid)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass
        for output in self._outputs.values():
            output.finish(self._ready)


def _kill(pid: int) -> None:
    """Kill a rank, and the processes that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # PermissionError on macOS, if all of them have ended
        os.killpg(pid, signal.SIGKILL)


def _how(code: int) -> str:
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
    while True:
        try:
            loop.run_forever()
        except BaseException:  # noqa: BLE001, S112 -- SystemExit of a task, which belongs to whoever awaits it
            continue


if __name__ == "__main__":
    main()
