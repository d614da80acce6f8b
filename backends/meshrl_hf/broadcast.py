"""Weights that a policy's ranks broadcast from their shards, bucket by bucket: the sending side.

Each rank is the root of one process group, whose other members are the ranks that read. So no rank gathers
anything, and each reader receives each byte once. They meet in the store of the policy's ranks: a reader asks there
(`reading`), the policy's first rank decides who reads together, and all of its ranks start to send.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf, prod
from secrets import token_hex
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.mesh import PATIENCE, Rank
from meshrl_hf.boxes import Box
from meshrl_hf.collective import IN_FLIGHT, KEPT, Asked, Groups, Passing, Staging, ask, comes, connect, view
from meshrl_hf.fingerprints import copied
from meshrl_hf.meeting import are_processes, meet, place
from meshrl_hf.offer import Layout, Part
from meshrl_hf.ranks import RankGroup

_ALIGNED: Final = 64
"""Bytes. Each part starts at a multiple."""
_APART: Final = 2 << 20
"""Bytes of a bucket's limit that its tensors leave to fingerprints, plans, threads and the rounding to large pages. At
most an eighth of the limit."""


class Sender:
    """The end of one policy rank. Between two changes of the parameters, it sends them to each reader that asks."""

    def __init__(self, ranks: RankGroup, rank: Rank, device: torch.device, dtype: torch.dtype, limit: int) -> None:
        """All ranks construct theirs together. `limit`: bytes of memory for a bucket. A longer row gets its own.

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
        self._device, self._dtype = device, dtype
        self._limit = limit - min(limit // 8, _APART)
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
        except Exception as error:  # noqa: BLE001 -- such as a store that is gone, with the policy's first rank
            log.warning("weights are no longer sent", error=str(error))
            if passes:
                with suppress(RuntimeError):  # the others would wait for it, and readers too
                    passes.end(self._other)

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
        deadline = inf
        while not self._ended and (not asked or len(asked) < max(each.together for each in asked)):
            if not comes(self._store, f"{self._key}/asked", deadline):
                log.warning("weights are sent without a reader that has not asked for them", there=len(asked))
                break
            if said := self._store.queue_pop(f"{self._key}/asked"):
                asked.append(Asked(*json.loads(said)))
                deadline = min(deadline, time.monotonic() + PATIENCE)
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

    def end(self, store: Store) -> None:
        """End the offer for all, over a connection that has not failed."""
        store.set(f"{self._key}/pass/{self._number}", json.dumps(None))
        store.set(f"{self._key}/gone", "1")

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


def fill(buffer: Tensor, layout: Layout, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Write the parts, cast to the dtype, and their fingerprints."""
    made = [copied(view(buffer, part, dtype), tensor) for part, tensor in zip(layout.parts, tensors, strict=True)]
    buffer[layout.end :].view(torch.int64).copy_(torch.stack(made))


def _told(store: Store, key: str) -> Passing | None:
    comes(store, key)
    told = json.loads(store.get(key))
    return Passing(*told) if told else None
