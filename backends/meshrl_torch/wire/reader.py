"""Read weights that a policy's ranks broadcast, bucket by bucket."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from secrets import token_hex
from threading import Lock
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from meshrl_torch.wire.bucket_bytes import bytes_in_place, copy, fingerprint, view
from meshrl_torch.wire.bucket_server import OpenError, open_slots
from meshrl_torch.wire.collective import Groups, InFlightBuckets
from meshrl_torch.wire.manifest import Layout, Manifest, Part
from meshrl_torch.wire.plan import STUCK, BroadcastPlan, ConflictError, Locality, ReadRequest, Route, StoreConnection

_ATTEMPTS: Final = 2
"""Attempts to read. One fails for all readers if one of them dies, and the others ask again."""
_ANSWER: Final = 600.0
"""Seconds within which the policy's first rank must announce a plan."""


class Lost(Exception):
    """Weights that did not arrive."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason


class Damaged(Exception):
    """Weights that differ from what was sent."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the tensors in the buckets that differ."""
        super().__init__(f"tensors in damaged buckets: {len(names)} ({', '.join(names[:3])})")


class Destination(Protocol):
    """Tensors of a model that parts are written to."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        ...

    def begin(self) -> None:
        """Prepare for all parts. Called again if they are sent again."""
        ...

    def place(self, part: Part) -> Tensor:
        """Return the memory for a part. It is written until `arrived` is called."""
        ...

    def arrived(self, part: Part) -> None:
        """Called when a part is in its place."""
        ...


class WeightLoader:
    """One attempt to load a manifest's parts, and the fingerprints of the received buckets."""

    def __init__(self, manifest: Manifest, destination: Destination, device: torch.device) -> None:
        """`device`: of the buckets."""
        self.manifest, self.device = manifest, device
        self._destination = destination
        self._received: dict[int, list[Tensor]] = {source.rank: [] for source in manifest.sources}
        """Fingerprints of received buckets, by sender."""
        self._sent: dict[int, Tensor] = {}
        """Fingerprints that the senders have sent, by sender."""

    def places(self, layout: Layout) -> Sequence[Tensor]:
        """Return the memory for a bucket's parts."""
        return [self._destination.place(part) for part in layout.parts]

    def load(self, rank: int, layout: Layout, places: Sequence[Tensor], content: Tensor, *, in_place: bool) -> None:
        """Copy the parts of a sender's bucket to their places, unless they are there."""
        self._received[rank].append(fingerprint(content))
        for part, place in zip(layout.parts, places, strict=True):
            if not in_place:
                copy(place, view(content, part))
            self._destination.arrived(part)

    def set_fingerprints(self, rank: int, fingerprints: Tensor) -> None:
        """Store a sender's bucket fingerprints (int64[buckets]); compared once all buckets have arrived."""
        self._sent[rank] = fingerprints

    def check(self) -> None:
        """Raise Damaged if buckets differ from what was sent."""
        names: list[str] = []
        for source in self.manifest.sources:
            if source.layouts:
                received = torch.stack(self._received[source.rank])
                differ: list[bool] = (received != self._sent[source.rank].to(received.device)).tolist()
                layouts = [layout for layout, differs in zip(source.layouts, differ, strict=True) if differs]
                names += [part.name for layout in layouts for part in layout.parts]
        if names:
            raise Damaged(list(dict.fromkeys(names)))


class Reader:
    """Reads broadcasts in this process. It keeps its groups and buckets from one version to the next."""

    def __init__(self) -> None:
        self._reading = Lock()
        """One actor of the process reads at a time, because its groups identify the process."""
        self._groups = Groups()
        self._flight = InFlightBuckets()
        self._connections: dict[str, StoreConnection] = {}
        """By address."""
        self._closed: set[str] = set()
        """Addresses of policies whose memory could not be opened. Their buckets come in groups from then on."""
        self._requests = count()
        self._token = token_hex(8)

    def read(
        self, manifest: Manifest, together: int, destination: Destination, warn: Callable[[int, str], object]
    ) -> str:
        """Receive all parts of a manifest, like all of the `together` ranks that read it at once.

        Returns the transport, such as "by gloo". Calls `warn` with the number of each failed attempt and its
        error. Raises Lost if some parts never arrive, Damaged if some differ from what was sent, and ConflictError if
        the policy cannot send them here.
        """
        failed = ""
        with self._reading, torch.no_grad():
            for attempt in range(_ATTEMPTS):
                try:
                    return self._attempt(manifest, together, destination)
                except (RuntimeError, OSError) as error:
                    failed = str(error).partition("\n")[0]
                    warn(attempt, failed)
                    self._connections.pop(manifest.address, None)
        raise Lost(f"{len(manifest.sources)} ranks of the policy", failed)

    def _attempt(self, manifest: Manifest, together: int, destination: Destination) -> str:
        address = manifest.address
        connection = self._connections.get(address) or self._connections.setdefault(address, StoreConnection(address))
        locality = Locality.of(destination.device)
        if address in self._closed:
            locality = locality._replace(machine="")
        plan = self._request(connection, manifest.key, together, locality)
        route, device = plan.routes[plan.readers.index(self._me)], plan.device(destination.device)
        try:
            destination.begin()
            self._groups.of(plan)
            loader = WeightLoader(manifest, destination, device)
            if route:
                self._open(loader, plan, route)
            else:
                self._receive(loader, plan, connection.for_groups)
            loader.check()
        except BaseException:
            self._flight.drop()
            self._groups.drop(plan.group)
            raise
        if route:
            return "by CUDA IPC" if plan.on_gpus else "through shared memory"
        return "by NCCL" if plan.on_gpus else "by gloo"

    def _open(self, loader: WeightLoader, plan: BroadcastPlan, route: Route) -> None:
        """Copy all buckets out of the memory of ranks of this machine."""
        prefix, _, _ = loader.manifest.key.partition("/")
        key = plan.key(loader.manifest.key)
        with ExitStack() as opened:
            try:
                clients = open_slots(opened, prefix, set(route), key, self._me, loader.device, STUCK.total_seconds())
            except OpenError:
                self._closed.add(loader.manifest.address)
                raise
            for source, number in loader.manifest.send_order():
                client = clients[route[source.rank]]
                if number < len(source.layouts):
                    layout = source.layouts[number]
                    content = client.bucket(source.rank, number, layout.nbytes)
                    loader.load(source.rank, layout, loader.places(layout), content, in_place=False)
                else:
                    content = client.bucket(source.rank, number, source.fingerprint_bytes)
                    loader.set_fingerprints(source.rank, content.view(torch.int64).to(loader.device, copy=True))
                client.done()

    def _receive(self, loader: WeightLoader, plan: BroadcastPlan, store: Store) -> None:
        """Receive all buckets in groups, each with a sender."""
        flight, device, manifest = self._flight, loader.device, loader.manifest
        sizes = [layout.nbytes for source in manifest.sources for layout in source.layouts]
        flight.begin(max(sizes, default=0), device)
        for source, number in manifest.send_order():
            group = self._groups.get(store, plan, source.rank, self._me, device)
            if number < len(source.layouts):
                layout = source.layouts[number]
                places = loader.places(layout)
                in_place = bytes_in_place(layout, places, device)
                content = flight.memory(layout.nbytes) if in_place is None else in_place
                load = partial(loader.load, source.rank, layout, places, content, in_place=in_place is not None)
                flight.add(group.broadcast(content, 0), load)
            else:
                content = torch.empty(source.fingerprint_bytes, dtype=torch.uint8, device=device)
                store_them = partial(loader.set_fingerprints, source.rank, content.view(torch.int64))
                flight.add(group.broadcast(content, 0), store_them)
        flight.end()

    def _request(self, connection: StoreConnection, key: str, together: int, locality: Locality) -> BroadcastPlan:
        """Ask to read an offer, and return the plan."""
        token = f"{self._me}/{next(self._requests)}"
        connection.push_request(key, json.dumps(ReadRequest(token, together, self._groups.names, locality)))
        if not connection.store.check([f"{key}/ended"]):
            if not connection.wait_for(f"{key}/plan/{token}", time.monotonic() + _ANSWER):
                raise Lost("the policy's ranks", f"its first rank has not answered for {_ANSWER:g} s")
            answer = json.loads(connection.store.get(f"{key}/plan/{token}"))
            if isinstance(answer, str):
                raise ConflictError(answer)
            if answer:
                return BroadcastPlan(*answer)
        reason = "the policy has been updated since, and keeps no older ones: publish again"
        raise Lost("the policy's ranks", reason)

    @property
    def _me(self) -> str:
        """The name of this process in groups. It changes after a fork."""
        return f"{self._token}-{os.getpid()}"
