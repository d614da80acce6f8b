"""Weights that a policy's ranks broadcast from their shards, bucket by bucket: the sending side.

Each rank is the root of one process group, whose other members are the ranks that read. So no rank gathers
anything, and each reader receives each byte once. They meet in the store of the policy's ranks: a reader asks there
(`live_weights`), the policy's first rank decides who reads together, and all of its ranks start to send.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from secrets import token_hex
from typing import Final, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from xxhash import xxh3_64

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.mesh import PATIENCE, Rank
from meshrl_hf.boxes import Box
from meshrl_hf.meeting import are_processes, meet, place
from meshrl_hf.ranks import RankGroup

IN_FLIGHT: Final = 2
"""Number of buckets in flight. Each has its memory, which is used again."""
STUCK: Final = timedelta(seconds=60)
"""Time without progress after which a collective fails. If a process dies, it fails at once."""
_ALIGNED: Final = 64
"""Bytes. Each part starts at a multiple."""
_BLOCK: Final = 1 << 17
"""Number of elements that are copied, and read again while they are in the cache."""
KEPT: Final = 4
"""Number of sets of readers whose groups are kept, newest last: for example a sampler's and a reference's."""
_WAKE: Final = timedelta(days=1)
"""Time between two checks of a store without news."""


class Part(NamedTuple):
    """A rectangle of a tensor, in a bucket."""

    name: str
    size: tuple[int, ...]
    """Size of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the rectangle in the tensor."""
    shape: tuple[int, ...]
    start: int
    """Offset in bytes."""


class Layout(NamedTuple):
    """The content of a bucket: parts of one dtype, and then a fingerprint of each, XXH3's 64 bits."""

    parts: tuple[Part, ...]
    end: int
    """End of the parts, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes with the fingerprints."""
        return self.end + 8 * len(self.parts)


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


class Sender:
    """The end of one policy rank. Between two changes of the parameters, it sends them to each reader that asks."""

    def __init__(self, ranks: RankGroup, rank: Rank, device: torch.device, dtype: torch.dtype, limit: int) -> None:
        """All ranks construct theirs together. `limit`: bytes of a bucket. A longer row gets its own.

        Raises ConfigError if the ranks are not processes.
        """
        if not are_processes(rank):
            raise ConfigError(
                'policy.weight_sync = "broadcast" sends weights between processes, but ranks of the local engine are '
                "threads: set run.engine = 'processes', or remove weight_sync"
            )
        meet(rank)
        self.place: Final = place()
        self._names = ranks.agree(lambda: token_hex(8))[0]
        self.number: Final = rank.index
        self.dtype: Final = str(dtype).removeprefix("torch.")
        """The name of the dtype."""
        self._device, self._dtype, self._limit = device, dtype, limit
        self._store = connect(self.place)
        self._other = connect(self.place)
        """A second connection, for requests that must not wait behind others."""
        self._offers = 0
        self._sending: threading.Thread | None = None
        self._staging = Staging()
        self._groups = Groups()
        self._known: list[Passing] = []
        """The readers whose groups are kept. Used by the rank that decides who reads together."""

    def offer(self, boxes: Iterable[Box]) -> tuple[str, tuple[Layout, ...]]:
        """Offer this rank's parts, as they are when they are sent. Returns the offer's name and the buckets."""
        self.end()
        self._offers += 1
        key = f"{self._names}/{self._offers}"
        buckets = planned(boxes, self._dtype, self._limit)
        self._sending = threading.Thread(target=self._serve, args=(key, buckets), name="meshrl-sender", daemon=True)
        self._sending.start()
        return key, tuple(layout for layout, _ in buckets)

    def end(self) -> None:
        """End the offer before the parameters change. Waits until nobody reads them."""
        if self._sending is not None:
            self.leave()
            self._sending.join()
            self._sending = None

    def leave(self) -> None:
        """End the offer without waiting. The first rank does so for all."""
        if self._sending is not None and self.number == 0:
            with suppress(RuntimeError):  # the store is gone, and with it everybody who waits there
                ask(self._other, f"{self._names}/{self._offers}", "")

    def _serve(self, key: str, buckets: "Sequence[tuple[Layout, Sequence[Tensor]]]") -> None:
        passes = _Passes(self._store, key, self._known, self._device) if self.number == 0 else None
        number = 0
        try:
            while passing := (passes.next() if passes else _told(self._store, f"{key}/pass/{number}")):
                number += 1
                self._send(passing, buckets)
        except Exception as error:  # noqa: BLE001 -- the policy's first rank is gone, which readers notice themselves
            log.warning("weights are no longer sent", error=str(error))

    def _send(self, passing: Passing, buckets: "Sequence[tuple[Layout, Sequence[Tensor]]]") -> None:
        """Broadcast all buckets. Readers see an error too, and ask again."""
        under_way: deque[dist.Work] = deque()
        try:
            device = passing.device(self._device)
            group = self._groups.get(self._store, passing, self.number, 0, device)
            buffers = self._staging.get((layout for layout, _ in buckets), device)
            for index, (layout, tensors) in enumerate(buckets):
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().wait()
                buffer = buffers[index % IN_FLIGHT][: layout.nbytes]
                fill(buffer, layout, tensors, self._dtype)
                under_way.append(group.broadcast(buffer))
            for each in under_way:
                each.wait()
        except RuntimeError as error:
            log.warning("weights did not reach all readers", readers=len(passing.members), error=str(error))
            self._groups.drop(passing.group)


class _Passes:
    """Decides for the first rank who reads together: readers that ask, as many as they announce."""

    def __init__(self, store: Store, key: str, known: list[Passing], device: torch.device) -> None:
        self._store, self._key, self._known, self._device = store, key, known, device
        self._number = 0
        self._ended = False

    def next(self) -> Passing | None:
        """Wait for readers. None once the offer has ended."""
        asked: list[Asked] = []
        deadline = None
        while not self._ended and (not asked or len(asked) < max(each.together for each in asked)):
            if not _comes(self._store, f"{self._key}/asked", deadline):
                log.warning("weights are sent without a reader that has not asked for them", there=len(asked))
                break
            if said := self._store.queue_pop(f"{self._key}/asked"):
                asked.append(Asked(*json.loads(said)))
                deadline = deadline or time.monotonic() + PATIENCE
            else:
                self._ended = True
        passing = self._passing(asked) if asked else None
        told = json.dumps(passing)
        self._store.set(f"{self._key}/pass/{self._number}", told)
        self._number += 1
        for each in asked:
            self._store.set(f"{self._key}/told/{each.token}", told)
        if passing is None:
            self._store.set(f"{self._key}/gone", "1")
        return passing

    def _passing(self, asked: "Sequence[Asked]") -> Passing:
        """Choose groups that all readers still have. Each sender keeps at least those that are known here."""
        members = sorted(each.token.partition("/")[0] for each in asked)
        on_gpus = self._device.type == "cuda" and all(each.on_gpu for each in asked)
        for known in self._known:
            same = (known.members, known.on_gpus) == (members, on_gpus)
            if same and all(known.group in each.groups for each in asked):
                return known
        made = Passing(token_hex(8), members, on_gpus)
        self._known[:] = [*self._known, made][-KEPT:]
        return made


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


def connect(where: str) -> Store:
    """Make a new connection to the store at HOST:PORT. A waiting request blocks all others on its connection."""
    host, _, port = where.rpartition(":")
    made = cast("Callable[..., Store]", vars(dist)["TCPStore"])  # public, but not in torch's type stubs
    return made(host, int(port), is_master=False, timeout=STUCK, wait_for_workers=False)


def planned(boxes: Iterable[Box], dtype: torch.dtype, limit: int) -> "list[tuple[Layout, Sequence[Tensor]]]":
    """Plan buckets of at most `limit` bytes, and the tensors of their parts. Larger tensors are split by rows."""
    made: list[tuple[Layout, Sequence[Tensor]]] = []
    parts, tensors, end = list[Part](), list[Tensor](), 0
    for box in boxes:
        for offsets, tensor in _pieces(box, dtype.itemsize, limit):
            nbytes = -(-tensor.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
            if parts and end + nbytes > limit:
                made.append((Layout(tuple(parts), end), tensors))
                parts, tensors, end = [], [], 0
            parts.append(Part(box.name, box.size, offsets, tuple(tensor.shape), end))
            tensors.append(tensor)
            end += nbytes
    return [*made, (Layout(tuple(parts), end), tensors)] if parts else made


def _pieces(box: Box, itemsize: int, limit: int) -> Iterable[tuple[tuple[int, ...], Tensor]]:
    tensor = box.tensor.detach()
    if not tensor.dim():
        yield box.offsets, tensor
        return
    rows = max(1, limit // max(1, prod(tensor.shape[1:]) * itemsize))
    for start in range(0, len(tensor), rows):
        yield (box.offsets[0] + start, *box.offsets[1:]), tensor[start : start + rows]


def view(buffer: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """Return a view of a part in a bucket."""
    flat = buffer[part.start : part.start + prod(part.shape) * dtype.itemsize]
    return flat.view(dtype).reshape(part.shape)


def copied(place: Tensor, tensor: Tensor) -> int:
    """Copy a tensor to its place, in that dtype. Returns XXH3's 64 bits of the copied bytes."""
    on_cpu = place.device.type == tensor.device.type == "cpu"
    if not (on_cpu and place.is_contiguous() and tensor.is_contiguous()):
        place.copy_(tensor)
        return _fingerprint([place.cpu().contiguous()])
    pairs = zip(place.reshape(-1).split(_BLOCK), tensor.reshape(-1).split(_BLOCK), strict=True)
    return _fingerprint(block.copy_(source) for block, source in pairs)


def _fingerprint(blocks: Iterable[Tensor]) -> int:
    digest = xxh3_64()
    for block in blocks:
        digest.update(block.reshape(-1).view(torch.uint8).numpy().data)
    return digest.intdigest()


def fill(buffer: Tensor, layout: Layout, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Write the parts, cast to the dtype, and their fingerprints."""
    made = [copied(view(buffer, part, dtype), tensor) for part, tensor in zip(layout.parts, tensors, strict=True)]
    buffer[layout.end :].copy_(torch.from_numpy(np.array(made, np.uint64).view(np.uint8)))


def _told(store: Store, key: str) -> Passing | None:
    _comes(store, key, None)
    told = json.loads(store.get(key))
    return Passing(*told) if told else None


def _comes(store: Store, key: str, deadline: float | None) -> bool:
    """Wait until a key is set. False if that takes until the deadline."""
    while True:
        left = _WAKE if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([key], left)
        except dist.DistStoreError:
            if deadline is not None:
                return False
        else:
            return True
