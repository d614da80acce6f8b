"""Where the ranks of a mesh meet, each a process of its own: a store that all of them see."""

import os
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from meshrl.mesh import Rank

PATIENCE: Final = timedelta(minutes=30)
"""How long a rank waits for another."""

_stores: Final[dict[str, Store]] = {}
"""By place. Kept: the first rank serves them to the others."""


def are_processes(rank: Rank) -> bool:
    """Whether each rank of the mesh is a process, and not a thread of this one."""
    return os.environ.get("WORLD_SIZE") == str(rank.size)


def place() -> str:
    """Where the ranks meet, host and port; another one after a process of the mesh was made anew."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def meet(rank: Rank) -> Store:
    """The store of the mesh. All ranks call it at the same time."""
    here = place()
    if here not in _stores:
        _stores[here], _, _ = next(rendezvous(f"tcp://{here}", rank.index, rank.size, timeout=PATIENCE))
    return _stores[here]
