"""The meeting place of a mesh's ranks, each a process: a store that all of them reach."""

import os
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from meshrl.mesh import PATIENCE, Rank

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
