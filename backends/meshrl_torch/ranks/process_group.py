"""The process group of a rank's process: made once, shared by all its actors, made again after a respawn."""

import os
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Final, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.mesh import PATIENCE, Rank
from meshrl_torch.ranks.host_monitor import Vigil

LONGEST_WAIT: Final = timedelta(minutes=30)
"""Longest time that a rank waits for another."""

_stores: Final[dict[str, Store]] = {}
"""By place. Kept, because the first rank serves its store to the others."""


def are_processes(rank: Rank) -> bool:
    """True if each rank of the mesh is a process, not a thread of this one."""
    return os.environ.get("WORLD_SIZE") == str(rank.size)


def place() -> str:
    """Return the meeting place, as host and port. It changes after a process of the mesh was restarted."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def patience_with_hosts() -> float:
    """Return the seconds after which a host that does not answer is given up: `run.patience`."""
    return float(os.environ.get("MESHRL_PATIENCE", PATIENCE))


def meet(rank: Rank) -> Store:
    """Return the store of the mesh. All ranks call it together."""
    here = place()
    if here not in _stores:
        _stores[here], _, _ = next(rendezvous(f"tcp://{here}", rank.index, rank.size, timeout=LONGEST_WAIT))
    return _stores[here]


T = TypeVar("T")


class _Joined(NamedTuple):
    """The group of this process."""

    place: str
    """The meeting place of its ranks, as host and port."""
    generation: str
    vigil: Vigil


_joined: _Joined | None = None
_first: Final = Lock()
"""Guards the default group of a mesh of one rank, because the local engine's roles are threads of one process."""


class Shared(Generic[T]):
    """Process groups, made once in a process for each key: they use threads, and are never freed.

    If the default group was made again, groups made from the old one are forgotten.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, T] = {}
        self._world: dist.ProcessGroup | None = None
        """The default group that they belong to."""
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` for this key, called once. All ranks ask for the same keys in the same order."""
        with self._lock:
            if self._world is not dist.group.WORLD:
                self._made.clear()
                self._world = dist.group.WORLD
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


def join(rank: Rank, device: torch.device, backend: str) -> None:
    """Make the process group of the mesh, unless this process is in it. All ranks call it together.

    ConfigError, which names the `backend`, if ranks of a mesh share a process.
    """
    global _joined  # noqa: PLW0603 - torch has one default group for each process
    if rank.size == 1:
        with _first:
            if not dist.is_initialized():
                own = cast("Callable[[], Store]", vars(dist)["HashStore"])  # public, but not in torch's type stubs
                dist.init_process_group(
                    _carrier(device), store=own(), rank=0, world_size=1, device_id=_bound(device)
                )  # fmt: skip
        return
    if not are_processes(rank):
        raise ConfigError(
            f"the backend '{backend}' needs a process for each of {rank.size} ranks, but ranks of the local engine "
            "are threads: set run.engine = 'processes', or use a mesh of one rank"
        )
    here = place()
    if _joined is not None and _joined.place == here:
        return
    store = meet(rank)
    known = _generations(store, rank, _joined.generation if _joined else "")
    if "" in known or len(known) > 1:  # a process is new, and the old group lacks it
        if _joined is not None:
            _joined.vigil.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            _carrier(device), store=PrefixStore("group", store), rank=rank.index, world_size=rank.size,
            timeout=LONGEST_WAIT, device_id=_bound(device),
        )  # fmt: skip
        lost = partial(_end_collectives, device, dist.group.WORLD)
        vigil = Vigil(store, rank, here.rpartition(":")[0], lost, patience_with_hosts())
        _joined = _Joined(here, here, vigil)
    elif _joined is not None:
        _joined = _joined._replace(place=here)


def _end_collectives(device: torch.device, world: dist.ProcessGroup | None, gone: int, silent: bool) -> None:
    """End collectives of the default group `world` after a rank was lost. gloo ends by itself if a process has ended.

    Nothing ends gloo's wait for a silent host but the end of this process, which the controller sees as its death.
    """
    if dist.group.WORLD is not world:
        return
    if silent:
        log.warning(
            f"this rank ends, because rank {gone} of its mesh cannot be reached: nothing was heard of its host for "
            f"{patience_with_hosts():g} s, which is run.patience: the host or the network between the two is down"
        )
        os._exit(1)
    if device.type == "cuda":
        log.info("a rank has gone, and collectives are ended", rank=gone)
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way to end them in one order


def _generations(store: Store, rank: Rank, own: str) -> set[str]:
    """Return the groups that the ranks' processes are in. Empty text for a process in none."""
    store.set(f"generation/{rank.index}", own)
    return {store.get(f"generation/{index}").decode() for index in range(rank.size)}


def _carrier(device: torch.device) -> str:
    """Return the backend for tensors. With NCCL, gloo carries what ranks agree on."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _bound(device: torch.device) -> torch.device | None:
    """Return the GPU for NCCL. Named, NCCL need not guess it or wait for the first collective to connect."""
    return device if device.type == "cuda" else None
