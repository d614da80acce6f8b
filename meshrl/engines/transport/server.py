"""The rank's end of a socket: answers for a `Host` if a caller knows the secret of the run."""

import asyncio
import errno
import os
import socket
import struct
import traceback
from functools import partial
from hmac import compare_digest
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from meshrl import log
from meshrl.engines.hosting import NO_ARGUMENTS, Arguments, Host
from meshrl.engines.transport.connection import LONGEST, Connection, leave_to_parent
from meshrl.engines.transport.frames import TOKEN_BYTES, Answer, Question, Taken, decode, dumped, encode, loaded
from meshrl.mesh import when_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshrl.mesh import Segment

_BACKLOG: Final = 1024
_PAUSE: Final = 1.0
"""Seconds before it accepts again when this process has too many open files."""


def listen(path: Path) -> socket.socket:
    """Open a socket at a path, which accepts connections from now on."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    made.listen(_BACKLOG)
    return made


class Server:
    """Accepts connections on the loop that runs where it is made."""

    def __init__(self, listening: socket.socket, token: bytes, host: Host) -> None:
        listening.setblocking(False)
        leave_to_parent(listening)
        self._listening = listening
        self._token = token
        self._host = host
        self._callers: set[_Peer] = set()
        asyncio.get_running_loop().add_reader(listening, self._accept)

    def _accept(self) -> None:
        try:
            end, _ = self._listening.accept()
        except OSError as error:  # it left before it was accepted, or there is no room now
            if error.errno in (errno.EMFILE, errno.ENFILE):
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(_PAUSE, loop.add_reader, self._listening, self._accept)
                log.warning(f"a calling process must wait: {error.strerror}")
            return
        if (user := _user(end)) not in (None, os.geteuid()):
            log.warning(f"a process of user {user} is refused, because it is not this run's user")
            end.close()
            return
        self._callers.add(_Peer(end, self._token, self._host, self._callers))


def _user(end: socket.socket) -> int | None:
    """Return the user of the process at the other end. None if the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    return int(user)


class _Peer:
    """A process that calls."""

    def __init__(self, end: socket.socket, token: bytes, host: Host, callers: "set[_Peer]") -> None:
        self._token = token
        self._host = host
        self._callers = callers
        self._known = False
        self._kept: dict[int, list[Segment]] = {}
        """Shared memory that answers name, kept until their reader has it."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(end, self._received, self._ended, TOKEN_BYTES)

    def _received(self, frame: bytes) -> None:
        if not self._known:
            self._known = compare_digest(frame, self._token)
            if not self._known:
                self._ended()
                self._connection.close()
            self._connection.most = LONGEST
            return
        message = decode(frame)
        if isinstance(message, Question):
            self._answer_soon(message)
        elif isinstance(message, Taken):
            self._kept.pop(message.number, None)

    def _answer_soon(self, question: Question) -> None:
        arguments, lost = None, None
        try:
            arguments = loaded(question.values)
        except BaseException as error:  # noqa: BLE001 -- a value's code may raise anything; the caller gets it
            lost = error
        if question.service == "cancel":
            self._host.cancel(*cast("tuple[str, int]", arguments))
            return
        self._tasks[question.number] = self._loop.create_task(self._answer(question, arguments, lost))

    async def _answer(self, question: Question, arguments: object, lost: BaseException | None) -> None:
        try:
            value = await self._work(question, arguments, lost)
            values, segments = await when_here(partial(dumped, value))
            answer = encode(Answer(question.number, values, leased=bool(segments)))
            self._connection.send(answer)
        except asyncio.CancelledError:  # the caller is gone
            raise
        except BaseException as error:  # noqa: BLE001 -- as above
            self._connection.send(_broken(question, error))
            return
        finally:
            del self._tasks[question.number]
        if segments:
            self._kept[question.number] = segments

    async def _work(self, question: Question, arguments: object, lost: BaseException | None) -> object:
        host, ask = self._host, question.ask
        if ask is not None:
            work = host.stream if question.service == "stream" else host.call
            return await work(ask, cast("Arguments", arguments) if question.values else NO_ARGUMENTS, lost)
        if lost is not None:
            raise lost
        service: Callable[..., object] = getattr(host, question.service)
        found = service(*cast("tuple[object, ...]", arguments or ()))
        return await found if isawaitable(found) else found

    def _ended(self) -> None:
        if not self._known:
            log.warning("a process that does not know this run's secret is refused")
        self._callers.discard(self)
        self._kept.clear()
        for task in self._tasks.values():
            task.cancel()


def _broken(question: Question, error: BaseException) -> bytes:
    """Answer a question that was lost."""
    reason = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    text = f"{reason}\n{''.join(traceback.format_exception(error))}"
    return encode(Answer(question.number, text.encode(errors="backslashreplace"), broken=True))
