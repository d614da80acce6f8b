"""Whose memory a process can open, and so by which policy rank a reader of a broadcast gets each bucket.

A process opens shared memory of its machine, and memory of the GPUs that it sees. Engines' processes do so too. They
have no meshrl.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")

Route: TypeAlias = list[int]
"""For each rank of the policy, the rank that hands its buckets to a reader. Empty: the reader joins the groups."""


class Where(NamedTuple):
    """Where a process has its tensors."""

    machine: str
    """Empty if the process opens no other's memory."""
    gpu: str = ""
    """UUID of the GPU. Empty if the tensors are in the host's memory."""
    seen: Sequence[str] = ()
    """UUIDs of all GPUs that the process sees."""

    @classmethod
    def of(cls, device: torch.device) -> "Where":
        """Return where this process is, with tensors on `device`."""
        if device.type != "cuda":
            return cls(_machine())
        seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        return cls(_machine(), seen[torch.empty(0, device=device).device.index], seen)

    def opens(self, other: "Where", on_gpus: bool) -> bool:
        """True if this process can open the other's buckets: on the other's GPU, or else in the host's memory."""
        return self.machine == other.machine != "" and (not on_gpus or other.gpu in self.seen)


def routes(policy: Sequence[Where], readers: Sequence[Where], on_gpus: bool) -> list[Route]:
    """Return the route of each reader. It opens what it can, and gets the rest by the first rank whose memory it opens.

    Readers on the GPU of a rank open no other, because CUDA takes some hundred MiB of each GPU that a process uses.
    """
    found: list[Route] = []
    for reader in readers:
        near = [rank for rank, each in enumerate(policy) if reader.opens(each, on_gpus)]
        own = [rank for rank in near if on_gpus and policy[rank].gpu == reader.gpu]
        open_to = own or near
        found.append([rank if rank in open_to else open_to[0] for rank in range(len(policy))] if near else [])
    return found


def on_gpus(policy: Sequence[Where], readers: Sequence[Where]) -> bool:
    """True if buckets can be on GPUs: all tensors are there, and no two members of a group of NCCL share a GPU."""
    if not all(each.gpu for each in (*policy, *readers)):
        return False
    found = routes(policy, readers, on_gpus=True)
    joined = [reader.gpu for reader, route in zip(readers, found, strict=True) if not route]
    relays = any(rank != by for route in found for rank, by in enumerate(route))
    members = joined + [each.gpu for each in policy] if joined or relays else []
    return len(set(members)) == len(members)


def _machine() -> str:
    """Return what processes that can exchange memory have in common. Empty if they should not, or cannot."""
    if os.environ.get("MESHRL_HANDOVER") == "0" or not hasattr(os, "memfd_create") or not _BOOT.exists():
        return ""
    network = _NETWORK.readlink()  # sockets without names reach no further
    return f"{socket.gethostname()} {_BOOT.read_text('ascii').strip()} {network} {os.getuid()}"
