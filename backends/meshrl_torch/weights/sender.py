"""Broadcast a policy's weights from the shards of its ranks, bucket by bucket: the sending side.

Readers that can open a rank's memory take buckets from there (`bucket_server`). Each rank is also the root of a process
group, whose other members are the readers elsewhere, and the ranks that hand its buckets to readers near them. So no
rank gathers anything, and each reader receives each byte once. They meet in the store of the policy's ranks: a reader
sends a request, the policy's first rank decides who reads together, and all of its ranks start to send.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from secrets import token_hex
from typing import Final

import torch
from torch import Tensor

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.mesh import PATIENCE, Rank
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.ranks.process_group import RankGroup, are_processes, mesh_store, store_address
from meshrl_torch.weights.buckets import OutgoingBucket, make_buckets
from meshrl_torch.wire.bucket_bytes import ALIGNED, bytes_in_place, fingerprint
from meshrl_torch.wire.bucket_server import BucketServer, ReaderConnections, server_name
from meshrl_torch.wire.collective import IN_FLIGHT, KEPT, Group, Groups, InFlightBuckets
from meshrl_torch.wire.manifest import Layout, RankBuckets, send_order
from meshrl_torch.wire.plan import (
    CPU,
    STUCK,
    BroadcastPlan,
    ConflictError,
    Locality,
    ReadRequest,
    StoreConnection,
    on_gpus,
    routes,
)

_RESERVED: Final = 2 << 20
"""Bytes of the limit that buckets leave to fingerprints, plans, threads and the rounding to large pages. At most an
eighth of the limit. Twice as much stays free, because buckets may take twice the limit."""
_RESERVED_FOR_FP8: Final = 4 << 20
"""Further bytes that they leave to numbers in float32 which become FP8."""


class Sender:
    """Sends one policy rank's weights to each reader that asks, until the parameters change."""

    def __init__(
        self, ranks: RankGroup, rank: Rank, device: torch.device, dtype: torch.dtype, limit: int,
        matrices: Collection[str] = frozenset(), is_wide: Callable[[str], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        """All ranks construct theirs together. `limit`: half the bytes of memory for buckets. `matrices`: sent in FP8.

        `is_wide`: True for the names of tensors that are sent in float32.

        Raises ConfigError if the ranks are not processes.
        """
        if not are_processes(rank):
            raise ConfigError(
                'policy.weight_sync = "broadcast" sends weights between processes, but ranks of the local engine are '
                "threads: set run.engine = 'processes', or remove weight_sync"
            )
        mesh_store(rank)
        self.address: Final = store_address()
        agreed = ranks.agree(lambda: (token_hex(8), Locality.of(device)))
        self._prefix = agreed[0][0]
        self._policy: Final = [locality for _, locality in agreed]
        self.number: Final = rank.index
        opens = self._policy[rank.index].machine
        self._server = BucketServer(server_name(self._prefix, rank.index)) if opens else None
        self.dtype: Final = str(dtype).removeprefix("torch.")
        """The name of the dtype."""
        self._device, self._dtype, self._matrices, self._is_wide = device, dtype, matrices, is_wide
        reserved = _RESERVED + _RESERVED_FOR_FP8 if matrices else _RESERVED
        self._limit = 2 * (limit - min(limit // 8, reserved)) // IN_FLIGHT // ALIGNED * ALIGNED
        self._connection = StoreConnection(self.address)
        self._unblocked = StoreConnection(self.address)
        """A second connection, for requests that must not wait behind others."""
        self._offers = 0
        self._sending: threading.Thread | None = None
        self._flight = InFlightBuckets()
        self._groups = Groups()
        self._known: list[BroadcastPlan] = []
        """Plans whose groups are kept. Used by the rank that decides who reads together."""

    def offer(self, boxes: Iterable[Box]) -> tuple[str, tuple[Layout, ...]]:
        """Offer this rank's parts, as they are when they are sent. Returns the offer's key and the buckets."""
        self.end()
        self._offers += 1
        key = f"{self._prefix}/{self._offers}"
        buckets = make_buckets(boxes, self._dtype, self._limit, self._matrices, self._is_wide)
        self._sending = threading.Thread(target=self._serve, args=(key, buckets), name="meshrl-sender", daemon=True)
        self._sending.start()
        return key, tuple(bucket.layout for bucket in buckets)

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
                self._unblocked.push_request(f"{self._prefix}/{self._offers}", "")

    def _serve(self, key: str, buckets: Sequence[OutgoingBucket]) -> None:
        planner = _Planner(self._connection, key, self._known, self._policy) if self.number == 0 else None
        number = 0
        try:
            while plan := planner.next() if planner else _announced(self._connection, f"{key}/plans/{number}"):
                number += 1
                self._try_to_send(key, plan, buckets)
        except Exception as error:  # noqa: BLE001 -- such as a store that is gone, with the policy's first rank
            log.warning("weights are no longer sent", error=str(error))
            if planner:
                with suppress(RuntimeError):  # the others would wait for it, and readers too
                    planner.end(self._unblocked)

    def _try_to_send(self, key: str, plan: BroadcastPlan, buckets: Sequence[OutgoingBucket]) -> None:
        """Send all buckets, then their fingerprints. Readers see an error too, and ask again."""
        try:
            self._send(key, plan, buckets)
        except (RuntimeError, OSError) as error:
            log.warning("weights did not reach all readers", readers=len(plan.readers), error=str(error))
            self._flight.drop()
            self._groups.drop(plan.group)
            self._known[:] = [each for each in self._known if each.group != plan.group]

    def _send(self, key: str, plan: BroadcastPlan, buckets: Sequence[OutgoingBucket]) -> None:
        """Send this rank's buckets, and forward those that readers get from this rank."""
        me, device, readers = self.number, plan.device(self._device), plan.readers_at(self.number)
        sizes = self._sizes(key, plan, [bucket.layout for bucket in buckets])
        self._flight.begin(max(chain(*sizes.values()), default=0), device, shared=bool(readers))
        self._groups.keep_only(plan.live_groups)

        def group(rank: int) -> Group | None:
            if not plan.members(rank):
                return None
            if rank not in self._groups.of(plan):
                self._flight.wait()  # readers may wait for buckets in flight, and others of the group for those readers
            return self._groups.get(self._connection.for_groups, plan, rank, str(me), device)

        with self._admit(plan.key(key), readers) as connections:
            forwarder = BucketForwarder(me, self._flight, group, connections, readers)
            fingerprints: list[Tensor] = []
            for rank, number in send_order({rank: len(each) - 1 for rank, each in sizes.items()}):
                if rank != me:
                    forwarder.send(rank, number, self._flight.memory(sizes[rank][number]))
                elif number < len(buckets):
                    fingerprints.append(forwarder.send_bucket(number, buckets[number], device))
                else:
                    forwarder.send_fingerprints(number, torch.stack(fingerprints))
            self._flight.end()

    def _sizes(self, key: str, plan: BroadcastPlan, layouts: Sequence[Layout]) -> Mapping[int, Sequence[int]]:
        """Return the bytes of all buckets and fingerprints that this rank sends or forwards, by their sender."""
        fingerprint_bytes = RankBuckets(self.number, tuple(layouts)).fingerprint_bytes
        sizes = {self.number: [*(layout.nbytes for layout in layouts), fingerprint_bytes]}
        if plan.relayed(self.number):
            self._connection.store.set(f"{key}/sizes/{self.number}", json.dumps(sizes[self.number]))
        for rank in plan.readers_at(self.number).keys() - sizes.keys():
            if not self._connection.wait_for(f"{key}/sizes/{rank}", time.monotonic() + STUCK.total_seconds()):
                raise TimeoutError(f"rank {rank} has not said how large its buckets are")
            sizes[rank] = json.loads(self._connection.store.get(f"{key}/sizes/{rank}"))
        return sizes

    def _admit(self, key: str, readers: Mapping[int, Sequence[str]]) -> ReaderConnections:
        """Wait for the readers that get buckets from this rank."""
        tokens = {token for each in readers.values() for token in each}
        if not self._server or not tokens:
            return ReaderConnections({}, CPU)
        return self._server.admit(key, tokens, self._flight.slots, STUCK.total_seconds())


class BucketForwarder:
    """Sends the buckets of one broadcast from this rank: in groups, and to readers that open its memory."""

    def __init__(
        self, rank: int, flight: InFlightBuckets, group: Callable[[int], Group | None],
        connections: ReaderConnections, readers: Mapping[int, Sequence[str]],
    ) -> None:  # fmt: skip
        """`group`: returns a sender's group, if it has members. `readers`: tokens at this rank, by sender."""
        self.rank: Final = rank
        self._flight, self._group, self._connections, self._readers = flight, group, connections, readers

    def send(self, rank: int, number: int, content: Tensor) -> None:
        """Send a bucket, or receive that of another rank, and hand it over."""
        group, tokens = self._group(rank), self._readers.get(rank)
        work = group.broadcast(content, 0) if group else None
        if not tokens:
            self._flight.add(work)
            return
        give = partial(self._connections.give, tokens, rank, number, self._flight.slot)
        copied_by_all = partial(self._connections.wait, tokens, self._flight.slot)
        if rank == self.rank:
            give()
            self._flight.add(work, copied_by_all)
        else:
            self._flight.add(work, copied_by_all, arrived=give)

    def send_bucket(self, number: int, bucket: OutgoingBucket, device: torch.device) -> Tensor:
        """Send a bucket of this rank, from its tensors' own memory if that is possible. Returns its fingerprint."""
        tensors = [piece.tensor for piece in bucket.pieces]
        content = None if self.rank in self._readers else bytes_in_place(bucket.layout, tensors, device)
        if content is None:
            content = self._flight.memory(bucket.layout.nbytes)
            bucket.write(content)
        self.send(self.rank, number, content)
        return fingerprint(content)

    def send_fingerprints(self, number: int, fingerprints: Tensor) -> None:
        """Send the fingerprints of this rank's buckets."""
        content = fingerprints.view(torch.uint8)
        if self.rank in self._readers:
            content = self._flight.memory(len(content)).copy_(content)
        self.send(self.rank, number, content)


class _Planner:
    """Decides for the first rank who reads together: readers that ask, as many as they announce."""

    def __init__(
        self, connection: StoreConnection, key: str, known: list[BroadcastPlan], policy: Sequence[Locality]
    ) -> None:
        """`policy`: the localities of its ranks."""
        self._connection, self._key, self._known, self._policy = connection, key, known, policy
        self._number = 0
        self._ended = False
        self._unanswered: list[ReadRequest] = []

    def next(self) -> BroadcastPlan | None:
        """Wait for readers. None once the offer has ended."""
        requests, deadline = self._unanswered, inf
        while not self._ended and (not requests or len(requests) < max(each.together for each in requests)):
            text = self._connection.next_request(self._key, deadline)
            if text is None:
                log.warning("weights are sent without a reader that has not asked for them", there=len(requests))
                break
            if text:
                requests.append(ReadRequest.parse(text))
                deadline = min(deadline, time.monotonic() + PATIENCE)
            else:
                self._ended = True
        if not requests:
            self.end(self._connection)
            return None
        try:
            plan = self._plan(requests)
        except ConflictError as conflict:
            self._answer(json.dumps(str(conflict)))
            return self.next()
        text = json.dumps(plan)
        self._connection.store.set(f"{self._key}/plans/{self._number}", text)
        self._number += 1
        self._answer(text)
        return plan

    def _answer(self, text: str) -> None:
        """Answer all requests."""
        while self._unanswered:
            self._connection.store.set(f"{self._key}/plan/{self._unanswered[0].token}", text)
            self._unanswered.pop(0)

    def end(self, connection: StoreConnection) -> None:
        """End the offer for all: the other ranks, readers that have asked, and readers that will."""
        connection.store.set(f"{self._key}/plans/{self._number}", json.dumps(None))
        connection.store.set(f"{self._key}/ended", "1")
        tokens = [each.token for each in self._unanswered]
        while (text := connection.pending_request(self._key)) is not None:
            tokens += [ReadRequest.parse(text).token] if text else []
        for token in tokens:
            connection.store.set(f"{self._key}/plan/{token}", json.dumps(None))

    def _plan(self, requests: Sequence[ReadRequest]) -> BroadcastPlan:
        """Choose routes, and groups that all readers still have. Each sender keeps at least those known here."""
        readers = {each.token.partition("/")[0]: each.locality for each in requests}
        members, localities = sorted(readers), [readers[token] for token in sorted(readers)]
        gpus = on_gpus(self._policy, localities)
        plan = BroadcastPlan(token_hex(8), members, gpus, routes(self._policy, localities, gpus), [])
        for known in self._known:
            if known._replace(group=plan.group) == plan and all(known.group in each.groups for each in requests):
                plan = known
        if plan not in self._known:
            self._known[:] = [*self._known, plan][-KEPT:]
        return plan._replace(live_groups=[known.group for known in self._known])


def _announced(connection: StoreConnection, key: str) -> BroadcastPlan | None:
    connection.wait_for(key)
    plan = json.loads(connection.store.get(key))
    return BroadcastPlan(*plan) if plan else None
