"""A torch.distributed group of two processes, which sends values in pieces from one machine to another."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from secrets import token_hex
from typing import Final, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from meshrl.engines.ray.refs import ValueStream
from meshrl.mesh import Bytes, address_of

IN_FLIGHT: Final = 2
"""Number of a value's pieces in flight at once."""


class Rendezvous(NamedTuple):
    """The address at which both processes meet."""

    name: str
    """The name of the group."""
    ip: str
    port: int


class _Group(Protocol):
    """The methods that torch's types lack."""

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> dist.Work:
        """Start to send a tensor to one process."""
        ...

    def recv(self, tensors: Sequence[torch.Tensor], of: int, tag: int) -> dist.Work:
        """Start to receive a tensor from one process."""
        ...


class Link:
    """One end of a group. Its first process sends numbered values to its second, several at once.

    If one of the two dies, or an operation exceeds the patience, all transfers fail. A failed link stays unusable.
    """

    def __init__(self, ip: str, patience: float, rendezvous: Rendezvous | None = None) -> None:
        """`ip`: of this machine. `patience`: in seconds. `rendezvous`: where the second waits, if this is the first."""
        self._patience = timedelta(seconds=patience)
        self._rank = int(rendezvous is None)
        _, at, port = rendezvous or Rendezvous("", ip, 0)
        self._store = TCPStore(at, port, is_master=rendezvous is None, timeout=self._patience, wait_for_workers=False)
        self.rendezvous: Final = rendezvous or Rendezvous(token_hex(8), ip, self._store.port)
        self.numbers: Final = count()
        """Numbers for the values that the second process requests."""
        self.failed: str = ""
        """Why it is unusable."""
        self.used: float = time.monotonic()
        """Time of the last piece that passed."""
        self._group: _Group | None = None
        self._making = threading.Lock()

    def send(self, flow: ValueStream, number: int) -> None:
        """Send a value, each piece as soon as it is here. Blocks. RuntimeError if that fails."""
        under_way: deque[dist.Work] = deque()
        try:
            for index in range(len(flow.pieces)):
                piece = flow.piece(index)
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().wait()
                under_way.append(self._joined().send([_tensor(piece)], 1, number))
            for each in under_way:
                each.wait()
        except Exception as error:
            self._fail(error)
            raise

    def receive(self, flow: ValueStream, number: int) -> None:
        """Receive the pieces of a value. Blocks. RuntimeError if the link or the flow fails."""
        under_way: deque[dist.Work] = deque()
        try:
            for index in range(len(flow.pieces) + IN_FLIGHT):
                if index >= IN_FLIGHT:
                    under_way.popleft().wait()
                    flow.came(index - IN_FLIGHT + 1)
                if index < len(flow.pieces):
                    under_way.append(self._joined().recv([_tensor(flow.pieces[index])], 0, number))
        except Exception as error:
            self._fail(error)
            flow.end(error)
            raise
        flow.end()

    def _joined(self) -> _Group:
        with self._making:
            if self.failed:
                raise RuntimeError(self.failed)
            self.used = time.monotonic()
            if self._group is None:
                self._group = cast("_Group", dist.ProcessGroupGloo(self._store, self._rank, 2, self._patience))
            return self._group

    def _fail(self, error: Exception) -> None:
        """Drop the group. Its connection closes when nothing waits on it any more."""
        with self._making:
            self.failed = self.failed or str(error)
            self._group = None


def _tensor(memory: Bytes) -> torch.Tensor:
    """Return the same memory as a tensor. The caller keeps it. torch would warn that it is read-only."""
    return torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(address_of(memory)), dtype=torch.uint8)
