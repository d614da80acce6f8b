"""Starts the template process and, through it, the ranks. Reports how they end."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes, token_hex
from struct import Struct
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakSet, finalize

import msgspec

from meshrl.engines.remote import TOKEN_BYTES, Address, RankLog, SocketChannel, listen, remove_folder, socket_folder
from meshrl.errors import ConfigError
from meshrl.mesh import Share

_TEMPLATE: Final = "meshrl.engines.processes.template"
_PATIENCE: Final = 5.0
"""Seconds that the template has to end the ranks."""
_LENGTH: Final = Struct("<I")


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Start a rank's process. The socket that it answers on is sent along, and the folder of `log`."""

    key: str
    folder: str
    """Its current folder."""
    paths: Sequence[str]
    """Its import path."""
    environment: Mapping[str, str]
    cores: Sequence[int]
    """The cores that it is pinned to. Empty: not pinned."""
    token: bytes
    inline_bytes: int
    share: Share
    """Its share of shared memory."""
    log: str = ""
    """The file for its output, in a folder that is sent along. Empty: it writes to the engine's output."""


class Kill(msgspec.Struct, tag="kill", frozen=True):
    """End a rank's process at once."""

    key: str


class Close(msgspec.Struct, tag="close", frozen=True):
    """End all ranks and the template. The engine's process continues."""


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Report that a rank's process has ended."""

    key: str
    reason: str


Order: TypeAlias = Begin | Kill | Close | Ended


def send(control: socket.socket, order: Order, files: Sequence[int] = ()) -> None:
    """Send a whole order, with open files."""
    frame = msgspec.msgpack.encode(order)
    whole = _LENGTH.pack(len(frame)) + frame
    sent = socket.send_fds(control, [whole], list(files))
    control.sendall(whole[sent:])


def receive(control: socket.socket) -> tuple[Order, list[int]] | None:
    """Receive the next order, with its files. None if the other side is gone."""
    head, files, _, _ = socket.recv_fds(control, _LENGTH.size, 2)
    while head and len(head) < _LENGTH.size:
        more = control.recv(_LENGTH.size - len(head))
        if not more:
            return None
        head += more
    if not head:
        return None
    left = _LENGTH.unpack(head)[0]
    parts: list[bytes] = []
    while left:
        part = control.recv(left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return msgspec.msgpack.decode(b"".join(parts), type=Order), files


class _RunningTemplate(NamedTuple):
    """The running template process."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket
    folder: Path
    """The folder of its ranks' sockets."""
    environment: Mapping[str, str]
    """The environment of this process when the template started."""
    end: "finalize[..., Launcher]"
    """Ends it and removes its folder, even if the engine is dropped because its user could not be made."""


class Launcher:
    """The template process, and a folder of sockets that only this user may enter.

    The template starts at once. It imports what ranks need while this process does something else.
    """

    def __init__(self, modules: Sequence[str], inline_bytes: int, share: Share) -> None:
        """`modules`: imported once, before ranks are forked. `share`: of shared memory."""
        self._modules = modules
        self._memory = inline_bytes, share
        self._token = token_bytes(TOKEN_BYTES)
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._was_used = self._is_closing = False
        self._template: _RunningTemplate | None = self._start()
        self._of_parent: _RunningTemplate | None = None
        """Kept after a fork: the process would warn when it is collected."""
        _launchers.add(self)

    def begin(self, environment: Mapping[str, str], cores: Sequence[int], log: RankLog | None = None) -> SocketChannel:
        """Start a rank's process, which writes to `log`. Raises `ConfigError` if that fails."""
        for _ in range(2):
            try:
                return self._order(environment, cores, log)
            except (BrokenPipeError, ConnectionResetError):
                self._lose()  # the loop has not noticed yet
        raise ConfigError("the template process of ranks ends as soon as it starts: see its output")

    def _order(self, environment: Mapping[str, str], cores: Sequence[int], log: RankLog | None) -> SocketChannel:
        if self._is_closing:
            raise ConfigError("the engine is being closed: reserve no more ranks of it")
        template = self._template = self._template or self._start()
        asyncio.get_running_loop().add_reader(template.control, self._read)
        self._was_used = True
        template.end.atexit = False  # the template sees this process exit, and then removes what it has held
        key = token_hex(8)
        path = template.folder / key
        channel = SocketChannel(Address(str(path), self._token))
        since = {name: value for name, value in os.environ.items() if template.environment.get(name) != value}
        with listen(path) as listening:
            place, own, name = str(Path.cwd()), {**since, **environment}, log.name if log else ""
            order = Begin(key, place, sys.path, own, cores, self._token, *self._memory, name)
            send(template.control, order, [listening.fileno(), *([log.folder] if log else [])])
        channel.end = self._ends[key] = asyncio.get_running_loop().create_future()
        return channel

    def kill(self, channel: SocketChannel) -> None:
        """End a rank's process at once."""
        channel.close()
        key = Path(channel.address.path).name
        if key in self._ends and self._template is not None:
            with suppress(OSError):
                send(self._template.control, Kill(key))
        Path(channel.address.path).unlink(missing_ok=True)

    async def close(self) -> None:
        """End the ranks and the template."""
        template, self._template = self._template, None
        if template is None:
            return
        self._is_closing = True
        asyncio.get_running_loop().remove_reader(template.control)
        with suppress(OSError):
            send(template.control, Close())
        template.control.close()
        try:
            if self._was_used:  # else there are no ranks, and it may still import for a while
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(template.process.wait, _PATIENCE)
        finally:
            template.end()
            self._is_closing = False

    def detach(self) -> None:
        """Drop the template in a process that was forked from the controller, which alone ends it."""
        if self._template is not None:
            self._template.control.close()
            self._template.end.detach()
            self._of_parent, self._template = self._template, None

    def _start(self) -> _RunningTemplate:
        ours, theirs = socket.socketpair()
        folder = socket_folder()
        environment = {"GOMP_SPINCOUNT": "5000", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        arguments = str(folder), ",".join(self._modules), os.environ.get("PYTHONPATH", "")
        with theirs:
            process = subprocess.Popen(  # noqa: S603 -- our own module
                [sys.executable, "-m", _TEMPLATE, str(theirs.fileno()), str(os.getpid()), *arguments],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return _RunningTemplate(process, ours, folder, dict(os.environ), finalize(self, _end, process, ours, folder))

    def _read(self) -> None:
        try:
            received = receive(self._template.control) if self._template is not None else None
        except OSError:
            received = None
        if received is None:
            self._lose()
            return
        ended, _ = received
        if isinstance(ended, Ended) and ended.key in self._ends:
            end = self._ends.pop(ended.key)
            if not end.done():
                end.set_result(ended.reason)

    def _lose(self) -> None:
        """Handle the death of the template, which ends its ranks too."""
        template, self._template = self._template, None
        if template is not None:
            asyncio.get_running_loop().remove_reader(template.control)
            template.end()
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


def _detach_all() -> None:
    for launcher in list(_launchers):
        launcher.detach()


os.register_at_fork(after_in_child=_detach_all)  # otherwise the template of a dead engine waits for the child's end too
