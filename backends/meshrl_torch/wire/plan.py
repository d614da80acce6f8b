"""How a policy's ranks and their readers agree on a broadcast: who opens whose memory, and who reads with whom."""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshrl_torch.wire import nccl

STUCK: Final = timedelta(seconds=60)
"""Time without progress after which a collective fails. If a process dies, it fails at once."""
CPU: Final = torch.device("cpu")
_LONGEST_WAIT: Final = 30.0
"""Longest single wait in seconds. Repeated, because a reader may die between its request and the bell."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")

Route: TypeAlias = list[int]
"""For each rank of the policy, the rank that hands its buckets to a reader. Empty: the reader joins the groups."""


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


class Locality(NamedTuple):
    """Where a process has its tensors."""

    machine: str
    """Empty if the process opens no other's memory."""
    gpu: str = ""
    """UUID of the GPU. Empty if the tensors are in the host's memory."""
    seen: Sequence[str] = ()
    """UUIDs of all GPUs that the process sees."""
    nccl: str = ""
    """The release of NCCL."""

    @classmethod
    def of(cls, device: torch.device) -> "Locality":
        """Return the locality of this process, with tensors on `device`."""
        if device.type != "cuda":
            return cls(_machine())
        seen = [gpu_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        return cls(_machine(), gpu_of(device), seen, nccl.release())

    def opens(self, other: "Locality", on_gpus: bool) -> bool:
        """True if this process can open the other's buckets: on the other's GPU, or else in the host's memory."""
        return self.machine == other.machine != "" and (not on_gpus or other.gpu in self.seen)


def machine_id() -> str:
    """Return the host's name and the id of its boot, which tells hosts of one name apart."""
    boot = _BOOT.read_text("ascii").strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()


def _machine() -> str:
    """Return what identifies processes that can exchange memory. Empty if they should not, or cannot."""
    if os.environ.get("MESHRL_HANDOVER") == "0" or not hasattr(os, "memfd_create") or not _BOOT.exists():
        return ""
    network = _NETWORK.readlink()  # sockets without names reach no further
    return f"{machine_id()} {network} {os.getuid()}"


def routes(policy: Sequence[Locality], readers: Sequence[Locality], on_gpus: bool) -> list[Route]:
    """Return the route of each reader. It opens what it can, and gets the rest from the first rank that it can open.

    Readers on the GPU of a rank open no other, because CUDA takes some hundred MiB of each GPU that a process uses.
    """
    made: list[Route] = []
    for reader in readers:
        near = [rank for rank, each in enumerate(policy) if reader.opens(each, on_gpus)]
        open_to = [rank for rank in near if on_gpus and policy[rank].gpu == reader.gpu] or near
        made.append([rank if rank in open_to else open_to[0] for rank in range(len(policy))] if near else [])
    return made


class ConflictError(Exception):
    """A policy and its readers cannot form groups."""


def on_gpus(policy: Sequence[Locality], readers: Sequence[Locality]) -> bool:
    """True if buckets can be on GPUs: all tensors are there, and no two members of a group share one.

    ConflictError if NCCL refuses the groups.
    """
    if not all(each.gpu for each in (*policy, *readers)):
        return False
    by_reader = routes(policy, readers, on_gpus=True)
    joined = [reader for reader, route in zip(readers, by_reader, strict=True) if not route]
    relays = any(rank != by for route in by_reader for rank, by in enumerate(route))
    members = [*joined, *policy] if joined or relays else []
    if len({each.gpu for each in members}) < len(members):
        return False
    if other := {each.nccl for each in joined if members} - {policy[0].nccl}:
        raise ConflictError(
            f"the policy's torch has NCCL {policy[0].nccl} and a reader's has {', '.join(sorted(other))}, which form "
            "no group: install one release of torch in both environments, or leave policy.weight_sync out"
        )
    return True


class BroadcastPlan(NamedTuple):
    """One reading of an offer, as the policy's first rank announces it in the store."""

    group: str
    """The name of the process groups. It is new if they have to be made again."""
    readers: list[str]
    """The readers' tokens, sorted."""
    on_gpus: bool
    """True if buckets are on GPUs."""
    routes: list[Route]
    """Of each reader."""
    live_groups: list[str]
    """The names of all groups that the first rank knows. The others drop the rest."""

    def device(self, own: torch.device) -> torch.device:
        """Return the device for the buckets of a process whose tensors are on `own`."""
        return own if self.on_gpus else CPU

    def members(self, sender: int) -> list[str]:
        """Return the members of a sender's group after itself: ranks that hand its buckets over, and readers."""
        ranks = {route[sender] for route in self.routes if route} - {sender}
        joined = [token for token, route in zip(self.readers, self.routes, strict=True) if not route]
        return [*map(str, sorted(ranks)), *joined]

    def key(self, offer: str) -> str:
        """Return the name of this reading of an offer with the key `offer`."""
        return f"{self.group} {offer}"

    def relayed(self, sender: int) -> bool:
        """True if other ranks hand a sender's buckets over."""
        return any(route[sender] != sender for route in self.routes if route)

    def readers_at(self, rank: int) -> dict[int, list[str]]:
        """Return the readers to which a rank hands buckets over, by the buckets' senders."""
        tokens: dict[int, list[str]] = {}
        for token, route in zip(self.readers, self.routes, strict=True):
            for sender, by in enumerate(route):
                if by == rank:
                    tokens.setdefault(sender, []).append(token)
        return tokens


class ReadRequest(NamedTuple):
    """The request of a reader."""

    token: str
    """The token of its process, and after a slash the number of its request."""
    together: int
    """Number of ranks that read together."""
    groups: list[str]
    """The groups that it has joined and that have not failed."""
    locality: Locality

    @classmethod
    def parse(cls, text: str) -> "ReadRequest":
        """Read a request in JSON."""
        token, together, groups, locality = json.loads(text)
        return cls(token, together, groups, Locality(*locality))


class StoreConnection:
    """A connection to the store of the policy's ranks. A waiting request blocks all others on it.

    Readers push requests to a queue, which is one step: a reader that dies has written all or nothing. Nobody waits for
    a queue, because torch's store would keep the waiter on its list and end a later wait too early. So a reader then
    rings a bell, for which the policy's first rank waits.
    """

    def __init__(self, address: str) -> None:
        """Connect to the store at HOST:PORT."""
        self._address: Final = address
        self.store = _connect(address)

    @cached_property
    def for_groups(self) -> Store:
        """A connection for process groups, which may use it at any time."""
        return _connect(self._address)

    def wait_for(self, key: str, deadline: float = inf) -> bool:
        """Wait until a key is set. False if that takes until the deadline, of `time.monotonic`."""
        while True:
            left = min(_LONGEST_WAIT, max(0.001, deadline - time.monotonic()))
            try:
                self.store.wait([key], timedelta(seconds=left))
            except dist.DistStoreError:
                self.store = _connect(self._address)  # on the old one, the next request might get this one's answer
                if self.store.check([key]) or time.monotonic() >= deadline:
                    return self.store.check([key])
            else:
                return True

    def push_request(self, key: str, text: str) -> None:
        """Send a request to the policy's first rank. Empty: the offer `key` ends."""
        self.store.queue_push(f"{key}/requests", text)
        self.store.set(f"{key}/rung/{self.store.add(f'{key}/bell', 0)}", "1")

    def next_request(self, key: str, deadline: float = inf) -> str | None:
        """Wait for the next request. None if there is none until the deadline."""
        while True:
            bell = self.store.add(f"{key}/bell", 1)  # a later reader rings this one or a later one
            if (text := self.pending_request(key)) is not None:
                return text
            rung = self.wait_for(f"{key}/rung/{bell}", min(deadline, time.monotonic() + _LONGEST_WAIT))
            if not rung and time.monotonic() >= deadline:
                return self.pending_request(key)

    def pending_request(self, key: str) -> str | None:
        """Return the next request without waiting. None if there is none."""
        is_queued = self.store.check([f"{key}/requests"])
        return self.store.queue_pop(f"{key}/requests", block=False).decode() if is_queued else None


def _connect(address: str) -> Store:
    host, _, port = address.rpartition(":")
    make = cast("Callable[..., Store]", vars(dist)["TCPStore"])  # public, but not in torch's type stubs
    return make(host, int(port), is_master=False, timeout=STUCK, wait_for_workers=False)
