"""Weights that a policy's ranks broadcast out of their own shards, bucket by bucket: who sends them.

Each rank is the root of a process group of its own, whose other members are the ranks that read. So no rank gathers
anything, and a reader is sent each byte once. The store in which the policy's ranks met brings them together: a reader
asks there (`live_weights`), the policy's first rank says who reads together, and all of its ranks begin to send.
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
"""Buckets that are under way at once, each in memory of its own, which is used again."""
STUCK: Final = timedelta(seconds=60)
"""After which a collective fails in which nothing moves; one of a process that dies fails at once."""
_ALIGNED: Final = 64
"""Bytes: each part starts at a multiple."""
_BLOCK: Final = 1 << 17
"""Numbers that are copied and read again before they leave the cache."""
KEPT: Final = 4
"""Sets of readers whose groups are kept, the last that were made: a sampler's, a reference's."""
_WAKE: Final = timedelta(days=1)
"""Between two looks at a store that has nothing new."""


class Part(NamedTuple):
    """A rectangle of a tensor, in a bucket."""

    name: str
    size: tuple[int, ...]
    """The whole tensor's."""
    offsets: tuple[int, ...]
    """Where the rectangle begins in it."""
    shape: tuple[int, ...]
    start: int
    """In bytes."""


class Layout(NamedTuple):
    """What a bucket has: parts of one dtype, and after them a fingerprint of each, XXH3's 64 bits."""

    parts: tuple[Part, ...]
    end: int
    """Of the parts, in bytes."""

    @property
    def nbytes(self) -> int:
        """With the fingerprints."""
        return self.end + 8 * len(self.parts)


class _Collectives(Protocol):
    """What torch's types do not say of a group."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Begin to give all members what one has."""
        ...

    def abort(self) -> None:
        """End what is under way."""
        ...


class Group:
    """A sender, its first member, and its readers: by NCCL if all have their tensors on GPUs, else by gloo."""

    def __init__(self, store: Store, name: str, number: int, size: int, device: torch.device) -> None:
        """All members make it at the same time, with the same name and size. RuntimeError where one does not come."""
        prefixed = PrefixStore(name, store)
        make = _by_nccl if device.type == "cuda" else _by_gloo
        self._made = cast("_Collectives", make(prefixed, number, size))

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to give the sender's bytes to all."""
        return self._made.broadcast(tensor, 0)

    def abort(self) -> None:
        """End what is under way, with an error for who waits for it."""
        self._made.abort()


def _by_gloo(store: Store, number: int, size: int) -> object:
    return dist.ProcessGroupGloo(store, number, size, STUCK)


def _by_nccl(store: Store, number: int, size: int) -> object:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 -- not there where torch has no CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = STUCK  # noqa: SLF001 -- as torch sets it, for want of another way
    return ProcessGroupNCCL(store, number, size, options)


class Staging:
    """Memory for the buckets that are under way. It is kept: to make it anew takes about as long as to fill it."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def get(self, layouts: Iterable[Layout], device: torch.device) -> Sequence[Tensor]:
        """Room for any of these buckets, as often as there are buckets under way."""
        most = max((layout.nbytes for layout in layouts), default=0)
        if not self._buffers or len(self._buffers[0]) < most or self._buffers[0].device != device:
            self._buffers.clear()
            self._buffers += (torch.empty(most, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT))
        return self._buffers


class Passing(NamedTuple):
    """Who reads together, as the policy's first rank says in the store."""

    group: str
    """A name of these members' groups; a new one where they have to be made anew."""
    members: list[str]
    """The readers' tokens, sorted: they are numbered from 1."""
    on_gpus: bool
    """Whether buckets lie on GPUs: those of a policy that is there, for readers that all are there too."""

    def device(self, own: torch.device) -> torch.device:
        """Where a process has its buckets, whose tensors are on a device of its own."""
        return own if self.on_gpus else torch.device("cpu")


class Groups:
    """Those that this process is in, by who reads together; a reader is in one with each sender. The latest last."""

    def __init__(self) -> None:
        self._made: dict[str, dict[int, Group]] = {}

    @property
    def whole(self) -> list[str]:
        """The names of those that have not failed, at most as many as are kept."""
        return list(self._made)

    def get(self, store: Store, passing: Passing, sender: int, number: int, device: torch.device) -> Group:
        """The group with a sender, which is made where it is new. `number`: this process's in it, a sender's is 0."""
        if passing.group not in self._made:
            while len(self._made) >= KEPT:
                self.drop(next(iter(self._made)))
            self._made[passing.group] = {}
        made = self._made[passing.group]
        if sender not in made:
            made[sender] = Group(store, f"{passing.group}/{sender}", number, len(passing.members) + 1, device)
        return made[sender]

    def drop(self, name: str) -> None:
        """They have failed, or are not needed any more."""
        for group in self._made.pop(name, {}).values():
            group.abort()


class Sender:
    """One rank's end, of a policy's. Between two changes of the parameters they are sent to whoever asks."""

    def __init__(self, ranks: RankGroup, rank: Rank, device: torch.device, dtype: torch.dtype, limit: int) -> None:
        """All ranks make theirs at the same time. `limit`: bytes of a bucket; a row that is longer has its own.

        ConfigError where the ranks are no processes.
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
        """By its name."""
        self._device, self._dtype, self._limit = device, dtype, limit
        self._store = connect(self.place)
        self._other = connect(self.place)
        """For who may not wait until the first lets somebody through."""
        self._offers = 0
        self._sending: threading.Thread | None = None
        self._staging = Staging()
        self._groups = Groups()
        self._known: list[Passing] = []
        """Whose groups are kept, where this rank says who reads together."""

    def offer(self, boxes: Iterable[Box]) -> tuple[str, tuple[Layout, ...]]:
        """From now on this rank's parts are sent to who asks, as they are then: by what name, and in which buckets."""
        self.end()
        self._offers += 1
        key = f"{self._names}/{self._offers}"
        buckets = planned(boxes, self._dtype, self._limit)
        self._sending = threading.Thread(target=self._serve, args=(key, buckets), name="meshrl-sender", daemon=True)
        self._sending.start()
        return key, tuple(layout for layout, _ in buckets)

    def end(self) -> None:
        """The parameters are about to change: wait until nobody reads them, and send them no more."""
        if self._sending is not None:
            self.leave()
            self._sending.join()
            self._sending = None

    def leave(self) -> None:
        """Send them to nobody else: the first rank says so for all."""
        if self._sending is not None and self.number == 0:
            with suppress(RuntimeError):  # the store is gone, and so is who waits there
                ask(self._other, f"{self._names}/{self._offers}", "")

    def _serve(self, key: str, buckets: "Sequence[tuple[Layout, Sequence[Tensor]]]") -> None:
        passes = _Passes(self._store, key, self._known, self._device) if self.number == 0 else None
        number = 0
        try:
            while passing := (passes.next() if passes else _told(self._store, f"{key}/pass/{number}")):
                number += 1
                self._send(passing, buckets)
        except Exception as error:  # noqa: BLE001 -- the policy's first rank is gone, and readers find that out themselves
            log.warning("weights are no longer sent", error=str(error))

    def _send(self, passing: Passing, buckets: "Sequence[tuple[Layout, Sequence[Tensor]]]") -> None:
        """Broadcast all buckets; what goes wrong its readers see too, and ask again."""
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
    """Who reads together, as the first rank decides it: those that ask, as many as they say."""

    def __init__(self, store: Store, key: str, known: list[Passing], device: torch.device) -> None:
        self._store, self._key, self._known, self._device = store, key, known, device
        self._number = 0
        self._ended = False

    def next(self) -> Passing | None:
        """Wait for readers; None where these weights are to be sent no more."""
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
        """With groups that all still have: each sender keeps at least those that are known here."""
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
    """What a reader says."""

    token: str
    """Its process's, and, after a slash, a number of its own for each time that it asks."""
    together: int
    """How many read at once."""
    groups: list[str]
    """Those that it has."""
    on_gpu: bool
    """Whether its tensors are there."""


def ask(store: Store, key: str, said: str) -> None:
    """Say something to the policy's first rank; in one step, so that who dies has said it or not begun to."""
    store.queue_push(f"{key}/asked", said)


def connect(where: str) -> Store:
    """A connection of one's own to the store of ranks that met at HOST:PORT: who waits there lets no other through."""
    host, _, port = where.rpartition(":")
    made = cast("Callable[..., Store]", vars(dist)["TCPStore"])  # public, but not in torch's type stubs
    return made(host, int(port), is_master=False, timeout=STUCK, wait_for_workers=False)


def planned(boxes: Iterable[Box], dtype: torch.dtype, limit: int) -> "list[tuple[Layout, Sequence[Tensor]]]":
    """Buckets of at most `limit` bytes, and the tensors of their parts; what is larger goes in several, row by row."""
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
    """A part where it lies in a bucket."""
    flat = buffer[part.start : part.start + prod(part.shape) * dtype.itemsize]
    return flat.view(dtype).reshape(part.shape)


def copied(place: Tensor, tensor: Tensor) -> int:
    """Copy a tensor to its place, in the dtype of that; XXH3's 64 bits of the bytes that are there then."""
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
    """Wait until something is said under a key; whether it was before the deadline."""
    while True:
        left = _WAKE if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([key], left)
        except dist.DistStoreError:
            if deadline is not None:
                return False
        else:
            return True
