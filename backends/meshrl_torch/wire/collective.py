"""Buckets of weights in memory, and the groups of processes that broadcast them: both sides of a broadcast.

Each sender is the root of a group, whose other members are the ranks that read. Engines' processes read too. They have
no meshrl.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import cached_property
from math import inf, prod
from typing import Final, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshrl_torch.wire.handover import Slots
from meshrl_torch.wire.locality import Route, Where
from meshrl_torch.wire.manifest import Layout, Part

IN_FLIGHT: Final = 6
"""Most buckets in flight."""
STUCK: Final = timedelta(seconds=60)
"""Time without progress after which a collective fails. If a process dies, it fails at once."""
_LONGEST_WAIT: Final = 30.0
"""Longest time of one wait, in seconds. Then it is asked again, because a reader may die before it rings."""
ALIGNED: Final = 64
"""Bytes. Each bucket and each part starts at a multiple."""
_BLOCK: Final = 1 << 20
"""Most bytes that are copied at once if torch makes temporary copies of them."""
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


def _nothing() -> None:
    pass


class _Flying(NamedTuple):
    """A bucket in flight."""

    work: dist.Work | None
    arrived: Callable[[], None]
    done: Callable[[], None]


class Flight:
    """The buckets in flight, oldest first, and memory to stage them.

    The memory is kept, because allocating it takes about as long as filling it.
    """

    def __init__(self) -> None:
        self._coming: deque[_Flying] = deque()
        self._there: deque[_Flying] = deque()
        """Buckets that have arrived, and are not done."""
        self._slots: Slots | None = None
        self._most, self._device, self._shared = 0, CPU, False
        self.slot = 0
        """The number of the last slot that was used."""

    def begin(self, most: int, device: torch.device, *, shared: bool = False) -> None:
        """Get ready for buckets of at most `most` bytes. `shared`: other processes open their memory."""
        most = max(1, -(-most // ALIGNED)) * ALIGNED
        if most > self._most or device != self._device or shared > self._shared:
            self._slots = None
            self._most, self._device, self._shared = most, device, shared

    @property
    def slots(self) -> Slots:
        """Memory for all buckets in flight, in one piece, because systems round each up to large pages."""
        if self._slots is None:
            self._slots = Slots(IN_FLIGHT, self._most, self._device, shared=self._shared)
        return self._slots

    def memory(self, nbytes: int) -> Tensor:
        """Return memory for the next staged bucket, uint8[nbytes]. It is used again after `IN_FLIGHT` others."""
        self.slot = (self.slot + 1) % IN_FLIGHT
        return self.slots.tensor[self.slot, :nbytes]

    def add(
        self, work: dist.Work | None, done: Callable[[], None] = _nothing, arrived: Callable[[], None] | None = None
    ) -> None:
        """Add a bucket. `arrived` is called when it has arrived, and later `done`, before its memory is used again."""
        self._coming.append(_Flying(work, arrived or _nothing, done))
        if arrived and len(self._coming) > IN_FLIGHT // 2:
            self._arrive()
        if len(self._coming) + len(self._there) == IN_FLIGHT:
            self._end()

    def arrive(self) -> None:
        """Wait until all have arrived."""
        while self._coming:
            self._arrive()

    def end(self) -> None:
        """Wait until all are done. With NCCL, the device's default stream waits, and what follows there comes later."""
        self.arrive()
        while self._there:
            self._end()

    def drop(self) -> None:
        """Forget all, after an error. Else they would keep the connections of their group open."""
        self._coming.clear()
        self._there.clear()

    def _arrive(self) -> None:
        """Wait until the oldest that is coming has arrived."""
        oldest = self._coming.popleft()
        if oldest.work:
            oldest.work.wait()
        oldest.arrived()
        self._there.append(oldest)

    def _end(self) -> None:
        """Wait until the oldest is done."""
        if not self._there:
            self._arrive()
        self._there.popleft().done()


class Passing(NamedTuple):
    """The readers of one pass, as the policy's first rank announces them in the store."""

    group: str
    """The name of these members' groups. It is new if they have to be made again."""
    readers: list[str]
    """The readers' tokens, sorted."""
    on_gpus: bool
    """Whether buckets are on GPUs."""
    routes: list[Route]
    """Of each reader."""
    kept: list[str]
    """The names of all groups that the first rank knows. The others drop the rest."""

    def device(self, own: torch.device) -> torch.device:
        """Return the device for the buckets of a process whose tensors are on `own`."""
        return own if self.on_gpus else CPU

    def members(self, sender: int) -> list[str]:
        """Return who is in a sender's group after the sender: other ranks that hand its buckets over, and readers."""
        ranks = {route[sender] for route in self.routes if route} - {sender}
        joined = [token for token, route in zip(self.readers, self.routes, strict=True) if not route]
        return [*map(str, sorted(ranks)), *joined]

    def key(self, offer: str) -> str:
        """Return what names this reading of an offer, which has a key too."""
        return f"{self.group} {offer}"

    def relayed(self, sender: int) -> bool:
        """True if other ranks hand a sender's buckets over."""
        return any(route[sender] != sender for route in self.routes if route)

    def takers(self, rank: int) -> dict[int, list[str]]:
        """Return the readers to which a rank hands buckets over, by the buckets' senders."""
        found: dict[int, list[str]] = {}
        for token, route in zip(self.readers, self.routes, strict=True):
            for sender, by in enumerate(route):
                if by == rank:
                    found.setdefault(sender, []).append(token)
        return found


class Groups:
    """The groups of this process, by set of readers, newest last. A reader is in one group with each sender."""

    def __init__(self) -> None:
        self._made: dict[str, dict[int, Group]] = {}

    @property
    def whole(self) -> list[str]:
        """The names of groups that have not failed, at most as many as are kept."""
        return list(self._made)

    def only(self, names: Collection[str]) -> None:
        """Drop groups of other names."""
        for name in self._made.keys() - names:
            self.drop(name)

    def keep(self, passing: Passing) -> dict[int, Group]:
        """Return the groups of a set of readers. The oldest set is dropped if there are too many."""
        if passing.group not in self._made:
            while len(self._made) >= KEPT:
                self.drop(next(iter(self._made)))
            self._made[passing.group] = {}
        return self._made[passing.group]

    def get(self, store: Store, passing: Passing, sender: int, me: str, device: torch.device) -> Group:
        """Return the group with a sender, made if new. `me`: this process's token, or its number as a sender."""
        made = self.keep(passing)
        if sender not in made:
            everybody = [str(sender), *passing.members(sender)]
            made[sender] = Group(store, f"{passing.group}/{sender}", everybody.index(me), len(everybody), device)
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
    """The sets of readers that it has been in, and whose groups it has."""
    where: Where
    """Where its tensors are."""

    @classmethod
    def read(cls, said: str) -> "Asked":
        """Read a request in JSON."""
        token, together, groups, where = json.loads(said)
        return cls(token, together, groups, Where(*where))


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


def dtype_of(part: Part) -> torch.dtype:
    """Return the dtype of a part."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def nbytes_of(part: Part) -> int:
    """Return the size of a part in bytes."""
    return prod(part.shape) * dtype_of(part).itemsize


def view(buffer: Tensor, part: Part) -> Tensor:
    """Return a view of a part in a bucket."""
    flat = buffer[part.start : part.start + nbytes_of(part)]
    return flat.view(dtype_of(part)).reshape(part.shape)


def copy(place: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to its place, in that dtype.

    Between devices, torch makes temporary copies unless the bytes are the same and in order. Then blocks are copied.
    """
    in_order = place.dtype == tensor.dtype and place.is_contiguous() and tensor.is_contiguous()
    if in_order or place.device == tensor.device or tensor.nbytes <= _BLOCK:
        place.copy_(tensor)
    elif tensor[0].nbytes > _BLOCK:
        for pair in zip(place, tensor, strict=True):
            copy(*pair)
    else:
        rows = _BLOCK // tensor[0].nbytes
        for block, source in zip(place.split(rows), tensor.split(rows), strict=True):
            block.copy_(source)


def place_in(whole: Tensor, part: Part) -> Tensor:
    """Return a view of a part in the whole tensor."""
    place = whole.detach()
    for dim, (start, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
        place = place.narrow(dim, start, length)
    return place


def bytes_in_place(layout: Layout, tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Return the bytes of a bucket that is one tensor, in its own memory. None if they must be staged.

    `tensors`: the source or the place of each part.
    """
    if len(layout.parts) != 1:
        return None
    (tensor,) = tensors
    same = (tensor.dtype, tensor.device.type) == (dtype_of(layout.parts[0]), device.type)
    return tensor.detach().reshape(-1).view(torch.uint8) if same and tensor.is_contiguous() else None
