"""Buckets that one process fills and others of its machine open: shared memory, or a GPU's by CUDA IPC.

A policy's rank hands each bucket to its readers over Unix sockets, one for each reader. It writes which bucket is in
which slot, and the reader answers when it has copied it. Sockets have no names in the file system, and admit only
processes of the same user.
"""

import inspect
import json
import mmap
import os
import socket
import struct
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any, Final, Self, cast
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from meshrl_torch.wire import segments
from meshrl_torch.wire.plan import Locality

_NOTICE: Final = struct.Struct("<3I")
"""The rank whose bucket it is, the bucket's number among that rank's, and its slot."""
_HELLO: Final = 5.0
"""Seconds within which a process identifies itself. Others wait for that."""
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of a socket's other end, as the system reports them."""
_STORAGE: Final = (
    "storage_handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
    "event_handle", "event_sync_required",
)  # fmt: skip
"""The arguments of `rebuild_cuda_tensor` that name memory of a GPU."""


class Slots:
    """Memory for buckets, uint8[count, nbytes]. Other processes can open it if it is `shared`."""

    def __init__(self, count: int, nbytes: int, device: torch.device, *, shared: bool) -> None:
        """`nbytes`: at least 1."""
        self.file: int | None = None
        """The descriptor of shared memory. It has no name that a killed process could leave behind."""
        if shared and device.type == "cpu":
            self.file = os.memfd_create("meshrl-buckets")
            weakref.finalize(self, os.close, self.file)
            os.truncate(self.file, count * nbytes)
            flat = _mapped(self.file, count * nbytes)
        elif shared:
            flat = segments.fixed(count * nbytes, device)
        else:
            flat = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
        self.tensor: Final = flat.view(count, nbytes)

    @cached_property
    def form(self) -> Mapping[str, object]:
        """How others open them. Made once, because torch adds to a GPU's memory something for each time."""
        form = {"count": len(self.tensor), "nbytes": self.tensor.shape[1]}
        if self.file is not None:
            return form
        names = inspect.signature(cast("Any", rebuild_cuda_tensor)).parameters
        made = dict(zip(names, cast("Sequence[Any]", reduce_tensor(self.tensor)[1]), strict=True))
        handle = {name: _text(made[name]) for name in _STORAGE}
        return {**form, "gpu": Locality.of(self.tensor.device).gpu, "handle": handle}


_own_slots: Final[WeakValueDictionary[str, Slots]] = WeakValueDictionary()
"""The slots of ranks in this process, by the names of their servers."""
_sockets: Final[WeakSet[socket.socket]] = WeakSet()
"""The sockets of this process."""


def _close_copies() -> None:
    """Close the sockets of a process that was forked from one with readers. Else the others would wait for it too."""
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_close_copies)


def server_name(prefix: str, rank: int) -> str:
    """Return the name of a rank's server. `prefix`: shared by the policy's ranks, unique on their machines."""
    return f"meshrl-{prefix}-{rank}"


class OpenError(ConnectionError):
    """Memory that could not be opened."""


class BucketServer:
    """Where readers on its machine connect to a policy's rank."""

    def __init__(self, name: str) -> None:
        """Listen under a name that is unique on the machine."""
        self._name = name
        self._listening: Final = socket.socket(socket.AF_UNIX)
        weakref.finalize(self, self._listening.close)
        _sockets.add(self._listening)
        self._listening.bind(f"\0{name}")
        self._listening.listen(socket.SOMAXCONN)

    def admit(self, key: str, tokens: Collection[str], slots: Slots, seconds: float) -> "ReaderConnections":
        """Wait for the readers of a broadcast, and let them open the slots. TimeoutError if one does not connect."""
        _own_slots[self._name] = slots
        deadline = time.monotonic() + seconds
        with ExitStack() as opened:
            admitted: dict[str, socket.socket] = {}
            while len(admitted) < len(tokens):
                self._listening.settimeout(max(0.001, deadline - time.monotonic()))
                connection = opened.enter_context(self._listening.accept()[0])
                _sockets.add(connection)
                connection.settimeout(_HELLO)
                token = _token(connection, key)
                if token in tokens:
                    connection.settimeout(seconds)
                    admitted[token] = connection
                    _send(connection, json.dumps(slots.form).encode())
                    if slots.file is not None:
                        socket.send_fds(connection, [b"\0"], [slots.file])
                else:
                    connection.close()
            opened.pop_all()
        return ReaderConnections(admitted, slots.tensor.device)


class ReaderConnections:
    """The readers of a broadcast that have opened a rank's slots. Methods raise OSError if one is gone, or is stuck."""

    def __init__(self, readers: Mapping[str, socket.socket], device: torch.device) -> None:
        """`readers`: connections, by token."""
        self._readers, self._device = readers, device
        self._uncopied: dict[str, set[int]] = {token: set() for token in readers}
        """The slots that each reader has not copied yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._readers.values():
            each.close()

    def give(self, tokens: Iterable[str], rank: int, number: int, slot: int) -> None:
        """Hand a rank's bucket over as soon as the device has written it."""
        _synchronize(self._device)
        for token in tokens:
            self._readers[token].sendall(_NOTICE.pack(rank, number, slot))
            self._uncopied[token].add(slot)

    def wait(self, tokens: Iterable[str], slot: int) -> None:
        """Wait until the readers have copied the bucket in a slot."""
        for token in tokens:
            while slot in self._uncopied[token]:
                self._uncopied[token].difference_update(_received(self._readers[token], 64, "a reader"))


class BucketClient:
    """A reader's connection to a policy's rank. Methods raise OSError if that is gone, or is stuck."""

    def __init__(self, name: str, key: str, token: str, device: torch.device, seconds: float) -> None:
        """Connect to the server of this name."""
        self._name, self._device, self._slot = name, device, 0
        self._early: Final[dict[tuple[int, int], int]] = {}
        """The slots of buckets that were given before their turn, by rank and number."""
        with ExitStack() as opened:
            self._connection = opened.enter_context(socket.socket(socket.AF_UNIX))
            _sockets.add(self._connection)
            self._connection.settimeout(seconds)
            self._connection.connect(f"\0{name}")
            if not _is_own(self._connection):
                raise ConnectionError("the policy's rank belongs to another user")
            _send(self._connection, json.dumps([key, token]).encode())
            opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def open(self) -> None:
        """Open the slots. Called before the first bucket."""
        form = json.loads(_message(self._connection))
        own = _own_slots.get(self._name) if "handle" in form else None  # CUDA does not open memory of the same process
        self._slots = own.tensor if own else _opened(self._connection, form, self._device)

    def bucket(self, rank: int, number: int, nbytes: int) -> Tensor:
        """Wait for a rank's bucket, uint8[nbytes]."""
        while (rank, number) not in self._early:
            *given, slot = _NOTICE.unpack(_exactly(self._connection, _NOTICE.size, "a rank of the policy"))
            self._early[given[0], given[1]] = slot
        self._slot = self._early.pop((rank, number))
        return self._slots[self._slot, :nbytes]

    def done(self) -> None:
        """Report that the bucket is copied, as soon as the devices have copied it."""
        for device in {self._device, self._slots.device}:
            _synchronize(device)
        self._connection.sendall(bytes([self._slot]))


def open_slots(
    stack: ExitStack, prefix: str, ranks: Iterable[int], key: str, token: str, device: torch.device, seconds: float
) -> Mapping[int, BucketClient]:
    """Open the slots of a policy's ranks, until the stack is closed. Raises OpenError.

    Connects to every rank first, even if one refuses, so that no sender waits for a reader that will fail.
    """
    clients: dict[int, BucketClient] = {}
    failed: Exception | None = None
    for rank in sorted(ranks):
        try:
            client = BucketClient(server_name(prefix, rank), key, token, device, seconds)
            clients[rank] = stack.enter_context(client)
        except OSError as error:
            failed = error
    try:
        if failed:
            raise failed
        for each in clients.values():
            each.open()
    except (RuntimeError, OSError, ValueError) as error:
        raise OpenError(f"the memory of the policy's ranks cannot be opened: {error}") from error
    return clients


def _opened(connection: socket.socket, form: Mapping[str, Any], device: torch.device) -> Tensor:
    """Open the slots of the other end, uint8[count, nbytes]."""
    count, nbytes = form["count"], form["nbytes"]
    if "handle" not in form:
        _, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            raise ConnectionError("no file came")
        try:
            return _mapped(files[0], count * nbytes).view(count, nbytes)
        finally:
            os.close(files[0])
    made: Tensor = cast("Any", rebuild_cuda_tensor)(
        tensor_cls=Tensor, tensor_size=(count, nbytes), tensor_stride=(nbytes, 1), tensor_offset=0,
        storage_cls=torch.TypedStorage, dtype=torch.uint8, storage_device=Locality.of(device).seen.index(form["gpu"]),
        requires_grad=False, **{name: _value(each) for name, each in form["handle"].items()},
    )  # fmt: skip
    return made


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what this thread asked of it, because another process cannot know."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _token(connection: socket.socket, key: str) -> str:
    """Return the token of a reader of this broadcast. Empty for any other process, such as a reader that was late."""
    try:
        hello = json.loads(_message(connection)) if _is_own(connection) else None
    except (OSError, ValueError):
        return ""
    return str(hello[1]) if isinstance(hello, list) and len(hello) == 2 and hello[0] == key else ""


def _text(value: object) -> object:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _value(text: Any) -> object:
    return bytes.fromhex(text["hex"]) if isinstance(text, dict) else text


def _is_own(connection: socket.socket) -> bool:
    """True if the other end is a process of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _message(connection: socket.socket) -> bytes:
    """Return the next message."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int, peer: str = "the other process") -> bytes:
    content = b""
    while len(content) < size:
        content += _received(connection, size - len(content), peer)
    return content


def _received(connection: socket.socket, most: int, peer: str) -> bytes:
    """Return what has arrived. ConnectionError if the other end, named `peer`, is gone."""
    with suppress(ConnectionResetError):
        if content := connection.recv(most):
            return content
    raise ConnectionError(f"{peer} has ended its part")
