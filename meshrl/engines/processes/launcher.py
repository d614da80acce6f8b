"""Starts the template process and, through it, the ranks. Hears how they end."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Final
from weakref import WeakSet, finalize

from meshrl.engines.hosting import RankLog
from meshrl.engines.processes.orders import Begin, Close, Ended, Kill, receive, send
from meshrl.engines.transport import TOKEN_BYTES, Address, SocketChannel, listen, remove_folder, socket_folder
from meshrl.errors import ConfigError
from meshrl.mesh import Share

_TEMPLATE: Final = "meshrl.engines.processes.template"
_PATIENCE: Final = 5.0
"""Seconds that the template has to end the ranks."""


class Launcher:
    """The template process, and a folder of sockets that only this user may enter.

    The template starts at once. It imports what ranks need while this process does something else.
    """

    def __init__(self, modules: Sequence[str], inline_bytes: int, share: Share) -> None:
        """`modules`: imported once, before ranks are forked. `share`: of shared memory."""
        self._modules = modules
        self._keeps = inline_bytes, share
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: Path | None = None
        self._token = token_bytes(TOKEN_BYTES)
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._end: finalize[..., Launcher] | None = None
        """Ends the template, even if the engine is dropped because its user could not be made."""
        self._was_used = False
        self._inherited: Mapping[str, str] = {}
        """The environment in which the template started."""
        _launchers.add(self)
        self._started()

    def begin(self, environment: Mapping[str, str], cores: Sequence[int], log: RankLog | None = None) -> SocketChannel:
        """Start a rank's process, which writes to `log`. Raises `ConfigError` if that fails."""
        for _ in range(2):
            try:
                return self._ordered(environment, cores, log)
            except (BrokenPipeError, ConnectionResetError):
                self._lost()  # the loop has not noticed yet
        raise ConfigError("the template process of ranks ends as soon as it starts: see its output")

    def _ordered(self, environment: Mapping[str, str], cores: Sequence[int], log: RankLog | None) -> SocketChannel:
        control, folder = self._started()
        asyncio.get_running_loop().add_reader(control, self._hear)
        self._was_used = True
        if self._end is not None:
            self._end.atexit = False  # the template sees this process exit, and then removes what it has held
        key = token_hex(8)
        path = folder / key
        channel = SocketChannel(Address(str(path), self._token))
        since = {name: value for name, value in os.environ.items() if self._inherited.get(name) != value}
        with listen(path) as listening:
            place, own, name = str(Path.cwd()), {**since, **environment}, log.name if log else ""
            order = Begin(key, place, sys.path, own, cores, self._token, *self._keeps, name)
            send(control, order, [listening.fileno(), *([log.folder] if log else [])])
        channel.end = self._ends[key] = asyncio.get_running_loop().create_future()
        return channel

    def kill(self, channel: SocketChannel) -> None:
        """End a rank's process at once."""
        channel.close()
        key = Path(channel.address.path).name
        if key in self._ends and self._control is not None:
            with suppress(OSError):
                send(self._control, Kill(key))
        Path(channel.address.path).unlink(missing_ok=True)

    async def close(self) -> None:
        """End the ranks and the template."""
        if self._template is None or self._control is None or self._folder is None:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        with suppress(OSError):
            send(self._control, Close())
        self._control.close()
        try:
            if self._was_used:  # else there are no ranks, and it may still import for a while
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._template.wait, _PATIENCE)
        finally:
            self._forget()

    def let_go(self) -> None:
        """Drop the template in a process that was forked from the controller, which alone ends it."""
        if self._control is not None:
            self._control.close()
        if self._end is not None:
            self._end.detach()
        self._control = self._folder = None

    def _forget(self) -> None:
        """Remove what the template would have removed. It has ended, or ends now."""
        if self._end is not None:
            self._end()
        self._template = self._control = self._folder = None

    def _started(self) -> tuple[socket.socket, Path]:
        if self._control is not None and self._folder is not None:
            return self._control, self._folder
        ours, theirs = socket.socketpair()
        self._folder = socket_folder()
        self._inherited = dict(os.environ)
        environment = {"GOMP_SPINCOUNT": "5000", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            command = [
                sys.executable,
                "-m",
                _TEMPLATE,
                str(theirs.fileno()),
                str(os.getpid()),
                str(self._folder),
                ",".join(self._modules),
                os.environ.get("PYTHONPATH", ""),
            ]
            self._template = subprocess.Popen(  # noqa: S603 -- our own module
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._control = ours
        self._end = finalize(self, _end, self._template, ours, self._folder)
        return ours, self._folder

    def _hear(self) -> None:
        try:
            received = receive(self._control) if self._control is not None else None
        except OSError:
            received = None
        if received is None:
            self._lost()
            return
        ended, _ = received
        if isinstance(ended, Ended) and ended.key in self._ends:
            end = self._ends.pop(ended.key)
            if not end.done():
                end.set_result(ended.how)

    def _lost(self) -> None:
        """Handle the death of the template, which ends its ranks too."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        self._forget()
        ends, self._ends = self._ends, {}
        for end in ends.values():
            if not end.done():
                end.set_result("the process that ranks are made of is gone, and they with it")


def _end(template: "subprocess.Popen[bytes]", control: socket.socket, folder: Path) -> None:
    control.close()
    template.kill()
    template.wait()
    remove_folder(folder)


_launchers: WeakSet[Launcher] = WeakSet()


def _let_go() -> None:
    for launcher in list(_launchers):
        launcher.let_go()


os.register_at_fork(after_in_child=_let_go)  # otherwise the template of a dead engine waits for the child's end too
