"""The ranks along `tp`, whose GPUs one engine uses. The first of them runs it, and the others lend their GPUs."""

import os
import socket
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_torch.ranks.process_group import are_processes, meet

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Place(NamedTuple):
    """A rank's machine and GPUs."""

    machine: str
    """Identifies machines with common shared memory."""
    gpus: tuple[str, ...]
    """GPUs of this rank alone, by CUDA's names. Empty on a CPU, or if all ranks see all GPUs."""

    @classmethod
    def here(cls) -> "Place":
        """Return the place of this process."""
        boot = _BOOT.read_text("ascii").strip() if _BOOT.exists() else ""
        names = os.environ.get(_VISIBLE, "").split(",")
        return cls(f"{socket.gethostname()} {boot}".strip(), tuple(name for name in names if name))


def first(rank: Rank) -> bool:
    """True if the rank runs an engine."""
    return rank.axes.get("tp", 0) == 0


def size(rank: Rank) -> int:
    """Return the number of ranks of an engine."""
    return rank.shape.get("tp", 1)


def gather_gpus(rank: Rank) -> list[str]:
    """Return the GPUs that the rank's engine is to see. Empty if it is to see the same as the rank.

    All ranks of the mesh call it together. Ranks without an engine only report theirs, and get nothing. ConfigError if
    the ranks cannot work together.
    """
    if size(rank) == 1:
        return []
    if not are_processes(rank):
        if rank.size > size(rank):
            raise ConfigError(
                f"{rank.size // size(rank)} engines of {size(rank)} ranks each, which are threads of one process, "
                "cannot have separate GPUs: set run.engine = 'ray', or use one engine"
            )
        return []
    store = meet(rank)
    store.set(_key(rank.index), msgspec.json.encode(Place.here()).decode())
    if not first(rank):
        return []
    places = {index: msgspec.json.decode(store.get(_key(index)), type=Place) for index in _members(rank)}
    return together(places)


def together(places: Mapping[int, Place]) -> list[str]:
    """Return the GPUs of an engine's ranks, given by number. ConfigError if they cannot work together."""
    told = "; ".join(f"rank {index} is on {place.machine.split()[0]}" for index, place in places.items())
    if len({place.machine for place in places.values()}) > 1:
        raise ConfigError(
            f"an engine needs its {len(places)} ranks along tp on one machine, and {told}: "
            'use a smaller tp, or arrange the mesh with tp as its last axis and placement = "pack"'
        )
    gpus = [gpu for place in places.values() for gpu in place.gpus]
    if gpus and (len(set(gpus)) < len(gpus) or not all(place.gpus for place in places.values())):
        has = "; ".join(f"rank {index} has {', '.join(place.gpus) or 'none'}" for index, place in places.items())
        raise ConfigError(
            f"an engine of {len(places)} ranks along tp needs a separate GPU for each, and {has}: set gpus = 1 for "
            "the sampler's mesh"
        )
    return gpus


def _members(rank: Rank) -> Sequence[int]:
    """Return the ranks of the rank's engine, in the order of `tp`."""
    others = {axis: at for axis, at in rank.axes.items() if axis != "tp"}
    places = enumerate(product(*(range(count) for count in rank.shape.values())))
    axes = [(index, dict(zip(rank.shape, place, strict=True))) for index, place in places]
    return [index for index, at in axes if all(at[axis] == mine for axis, mine in others.items())]


def _key(index: int) -> str:
    return f"engine/{index}"
