"""Buckets of weights in memory, and the groups of processes that broadcast them: both sides of a broadcast.

Each sender is the root of a group, whose other members are the ranks that read. Engines' processes read too. They have
no meshrl.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from math import inf, prod
from typing import Final, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshrl_hf.offer import Layout, Part

IN_FLIGHT: Final = 6
"""Most buckets in flight."""
STUCK: Final = timedelta(seconds=60)
"""Time without progress after which a collective fails. If a process dies, it fails at once."""
_LONGEST_WAIT: Final = 30.0
"""Longest time of one wait, in seconds. Then it is asked again, because a reader may die before it rings."""
ALIGNED: Final = 64
"""Bytes. Each bucket and each part starts at a multiple."""
CPU: Final = torch.device("cpu")
KEPT: Final = 4
"""Number of sets of readers whose groups are kept, newest last: for example a sampler's and a reference's."""


class _Collectives(Protocol):
    """The methods that torch's types lack."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Start to send the root's tensor to all members."""
        ...

    def abort(self) -> None:
        """Abort running collectives."""
        ...


class Group:
    """A sender, which is its first member, and its readers. NCCL if all have their tensors on GPUs, else gloo."""

    def __init__(self, store: Store, name: str, number: int, size: int, device: torch.device) -> None:
        """All members construct it together, with the same name and size. RuntimeError if one is missing."""
        prefixed = PrefixStore(name, store)
        make = _by_nccl if device.type == "cuda" else _by_gloo
        self._made = cast("_Collectives", make(prefixed, number, size))

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start to send the sender's bytes to all."""
        return self._made.broadcast(tensor, 0)

    def abort(self) -> None:
        """Abort running collectives. NCCL's end with an error. Gloo's end when the group is freed, or after `STUCK`."""
        self._made.abort()


def _by_gloo(store: Store, number: int, size: int) -> object:
    return dist.ProcessGroupGloo(store, number, size, STUCK)


def _by_nccl(store: Store, number: int, size: int) -> object:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 -- missing if torch has no CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = STUCK  # noqa: SLF001 -- torch sets it this way, and offers no other
    return ProcessGroupNCCL(store, number, size, options)


class Flight:
    """The buckets in flight, oldest first, and memory to stage them.

    The memory is kept, because allocating it takes about as long as filling it.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[dist.Work, Callable[[], None]]] = deque()
        self._slots = torch.empty(0)
        self._next = 0
        self._most, self._device = 0, CPU

    def begin(self, layouts: Iterable[Layout], device: torch.device) -> None:
        """Get ready for buckets."""
        most = max((-(-layout.nbytes // ALIGNED) * ALIGNED for layout in layouts), default=0)
        if most > self._most or device != self._device:
            self._slots = torch.empty(0)
            self._most, self._device = most, device

    def memory(self, nbytes: int) -> Tensor:
        """Return memory for the next staged bucket, uint8[nbytes]. It is used again after `IN_FLIGHT` others."""
        if len(self._slots) == 0:  # in one piece, because an operating system rounds each up to large pages
            self._slots = torch.empty((IN_FLIGHT, self._most), dtype=torch.uint8, device=self._device)
        self._next += 1
        return self._slots[self._next % IN_FLIGHT, :nbytes]

    def add(self, work: dist.Work, done: Callable[[], None] = lambda: None) -> None:
        """Add a bucket. `done` is called when it has arrived."""
        self._buckets.append((work, done))
        if len(self._buckets) == IN_FLIGHT:
            self._wait()

    def end(self) -> None:
        """Wait for all. With NCCL, the device's default stream waits, and later operations there come after them."""
        while self._buckets:
            self._wait()

    def drop(self) -> None:
        """Forget all, after an error. Else they would keep the connections of their group open."""
        self._buckets.clear()

    def _wait(self) -> None:
        """Wait for the oldest."""
        work, done = self._buckets.popleft()
        work.wait()
        done()


class Passing(NamedTuple):
    """The ranks that read together, as the policy's first rank announces them in the store."""

    group: str
    """The name of these members' groups. It is new if they have to be made again."""
    members: list[str]
    """The readers' tokens, sorted. Their numbers start at 1."""
    on_gpus: bool
    """Whether buckets are on GPUs: the policy's tensors and all readers' tensors are there."""

    def device(self, own: torch.device) -> torch.device:
        """Return the device for the buckets of a process whose tensors are on `own`."""
        return own if self.on_gpus else CPU


class Groups:
    """The groups of this process, by set of readers, newest last. A reader is in one group with each sender."""

    def __init__(self) -> None:
        self._made: dict[str, dict[int, Group]] = {}

    @property
    def whole(self) -> list[str]:
        """The names of groups that have not failed, at most as many as are kept."""
        return list(self._made)

    def get(self, store: Store, passing: Passing, sender: int, number: int, device: torch.device) -> Group:
        """Return the group with a sender, made if new. `number`: this process's number in it, 0 for a sender."""
        if passing.group not in self._made:
            while len(self._made) >= KEPT:
                self.drop(next(iter(self._made)))
            self._made[passing.group] = {}
        made = self._made[passing.group]
        if sender not in made:
            made[sender] = Group(store, f"{passing.group}/{sender}", number, len(passing.members) + 1, device)
        return made[sender]

    def drop(self, name: str) -> None:
        """Drop groups that failed or are no longer needed."""
        for group in self._made.pop(name, {}).values():
            group.abort()


class Asked(NamedTuple):
    """The request of a reader."""

    token: str
    """The token of its process, and after a slash the number of its request."""
    together: int
    """Number of ranks that read together."""
    groups: list[str]
    """The groups that it has."""
    on_gpu: bool
    """Whether its tensors are on a GPU."""


class Line:
    """A connection to the store of the policy's ranks. A waiting request blocks all others on it.

    Readers ask in a queue, because a push is one step: a reader that dies has written it all or nothing. Nobody waits
    for a queue, though. Torch's store would leave who did so on its list of waiters, and end a later wait too early. So
    a reader then rings, and the policy's first rank waits for that.
    """

    def __init__(self, where: str) -> None:
        """Connect to the store at HOST:PORT."""
        self._where: Final = where
        self.store = _connected(where)

    @cached_property
    def meeting(self) -> Store:
        """A connection for process groups, which may use it at any time."""
        return _connected(self._where)

    def renew(self) -> None:
        """Connect again. Needed if the time of a wait ended: the next request might get that one's answer."""
        self.store = _connected(self._where)

    def comes(self, key: str, deadline: float = inf) -> bool:
        """Wait until a key is set. False if that takes until the deadline, of `time.monotonic`."""
        while True:
            left = min(_LONGEST_WAIT, max(0.001, deadline - time.monotonic()))
            try:
                self.store.wait([key], timedelta(seconds=left))
            except dist.DistStoreError:
                self.renew()
                if self.store.check([key]) or time.monotonic() >= deadline:
                    return self.store.check([key])
            else:
                return True

    def ask(self, key: str, said: str) -> None:
        """Write to the policy's first rank."""
        self.store.queue_push(f"{key}/asked", said)
        self.store.set(f"{key}/rung/{self.store.add(f'{key}/bell', 0)}", "1")

    def asked(self, key: str, deadline: float = inf) -> str | None:
        """Wait for what the next reader has written. None if nobody has until the deadline."""
        while True:
            bell = self.store.add(f"{key}/bell", 1)  # who asks after the next look rings this one or a later one
            if (said := self.pending(key)) is not None:
                return said
            rung = self.comes(f"{key}/rung/{bell}", min(deadline, time.monotonic() + _LONGEST_WAIT))
            if not rung and time.monotonic() >= deadline:
                return self.pending(key)

    def pending(self, key: str) -> str | None:
        """Return what the next reader has written. None if nobody has."""
        there = self.store.check([f"{key}/asked"])
        return self.store.queue_pop(f"{key}/asked", block=False).decode() if there else None


def _connected(where: str) -> Store:
    host, _, port = where.rpartition(":")
    made = cast("Callable[..., Store]", vars(dist)["TCPStore"])  # public, but not in torch's type stubs
    return made(host, int(port), is_master=False, timeout=STUCK, wait_for_workers=False)


def view(buffer: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """Return a view of a part in a bucket."""
    flat = buffer[part.start : part.start + prod(part.shape) * dtype.itemsize]
    return flat.view(dtype).reshape(part.shape)


def place_in(whole: Tensor, part: Part) -> Tensor:
    """Return a view of a part in the whole tensor."""
    place = whole.detach()
    for dim, (start, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
        place = place.narrow(dim, start, length)
    return place


def bytes_in_place(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the bytes of a bucket that is one tensor, in its own memory. None if they must be staged."""
    if len(tensors) != 1:
        return None
    (tensor,) = tensors
    same = (tensor.dtype, tensor.device.type) == (dtype, device.type)
    return tensor.detach().reshape(-1).view(torch.uint8) if same and tensor.is_contiguous() else None
