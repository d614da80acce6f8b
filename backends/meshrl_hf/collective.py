"""Buckets of weights in memory, and the groups of processes that broadcast them: both sides of a broadcast.

Each sender is the root of a group, whose other members are the ranks that read. Engines' processes read too. They have
no meshrl.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import inf, prod
from typing import Final, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshrl_hf.fingerprints import copied
from meshrl_hf.offer import Layout, Part

IN_FLIGHT: Final = 2
"""Number of buckets in flight. Each has its memory, which is used again."""
STUCK: Final = timedelta(seconds=60)
"""Time without progress after which a collective fails. If a process dies, it fails at once."""
_LONGEST_PAUSE: Final = 0.02
"""Seconds between two looks at the store."""
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
        """Abort running collectives, with an error for waiting tasks."""
        self._made.abort()


def _by_gloo(store: Store, number: int, size: int) -> object:
    return dist.ProcessGroupGloo(store, number, size, STUCK)


def _by_nccl(store: Store, number: int, size: int) -> object:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 -- missing if torch has no CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = STUCK  # noqa: SLF001 -- torch sets it this way, and offers no other
    return ProcessGroupNCCL(store, number, size, options)


class Staging:
    """Memory for the buckets in flight. It is kept, because allocating it takes about as long as filling it."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def get(self, layouts: Iterable[Layout], device: torch.device) -> Sequence[Tensor]:
        """Return memory for any of these buckets, once for each bucket in flight."""
        most = max((layout.nbytes for layout in layouts), default=0)
        if not self._buffers or len(self._buffers[0]) < most or self._buffers[0].device != device:
            self._buffers.clear()
            self._buffers += (torch.empty(most, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT))
        return self._buffers


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
        return own if self.on_gpus else torch.device("cpu")


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


def ask(store: Store, key: str, said: str) -> None:
    """Write to the policy's first rank, in one step: a reader that dies has either written it all or nothing."""
    store.queue_push(f"{key}/asked", said)


def comes(store: Store, key: str, deadline: float = inf) -> bool:
    """Wait until a key is set. False if that takes until the deadline, of `time.monotonic`.

    It asks again and again. The store's own `wait` may mix up its answers if a key is set as its time ends: then the
    next request on this connection gets the answer of the last one.
    """
    pause = 0.001
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def connect(where: str) -> Store:
    """Make a new connection to the store at HOST:PORT. A waiting request blocks all others on its connection."""
    host, _, port = where.rpartition(":")
    made = cast("Callable[..., Store]", vars(dist)["TCPStore"])  # public, but not in torch's type stubs
    return made(host, int(port), is_master=False, timeout=STUCK, wait_for_workers=False)


def view(buffer: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """Return a view of a part in a bucket."""
    flat = buffer[part.start : part.start + prod(part.shape) * dtype.itemsize]
    return flat.view(dtype).reshape(part.shape)


def put(whole: Tensor, part: Part, tensor: Tensor) -> Tensor:
    """Copy a part to its place in the whole tensor. Returns the fingerprint of the copied bytes, as `copied` does."""
    place = whole
    for dim, (start, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
        place = place.narrow(dim, start, length)
    return copied(place, tensor)
