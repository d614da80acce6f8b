"""The ranks along `tp`, whose GPUs one engine uses. The first of them runs it, and the others lend their GPUs."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_torch.ranks.process_group import are_processes, mesh_store
from meshrl_torch.wire.plan import machine_id


class RankGpus(NamedTuple):
    """A rank's machine and GPUs."""

    machine: str
    """Identifies machines with common shared memory."""
    gpus: tuple[str, ...]
    """GPUs of this rank alone, by CUDA's names. Empty on a CPU, or if all ranks see all GPUs."""

    @classmethod
    def here(cls) -> "RankGpus":
        """Return those of this process."""
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return cls(machine_id(), tuple(name for name in names if name))


def runs_engine(rank: Rank) -> bool:
    """True if the rank runs an engine."""
    return rank.axes.get("tp", 0) == 0


def engine_size(rank: Rank) -> int:
    """Return the number of ranks of an engine."""
    return rank.shape.get("tp", 1)


def gather_gpus(rank: Rank) -> list[str]:
    """Return the GPUs that the rank's engine is to see. Empty if it is to see the same as the rank.

    All ranks of the mesh call it together. Ranks without an engine only report theirs, and get nothing. ConfigError if
    the ranks cannot work together.
    """
    size = engine_size(rank)
    if size == 1:
        return []
    if not are_processes(rank):
        if rank.size > size:
            raise ConfigError(
                f"{rank.size // size} engines of {size} ranks each, which are threads of one process, cannot have "
                "separate GPUs: set run.engine = 'ray', or use one engine"
            )
        return []
    store = mesh_store(rank)
    store.set(f"engine/{rank.index}", msgspec.json.encode(RankGpus.here()).decode())
    if not runs_engine(rank):
        return []
    numbers = np.arange(rank.size).reshape(tuple(rank.shape.values()))
    members = numbers[tuple(slice(None) if axis == "tp" else rank.axes[axis] for axis in rank.shape)].tolist()
    return join_gpus({index: msgspec.json.decode(store.get(f"engine/{index}"), type=RankGpus) for index in members})


def join_gpus(ranks: Mapping[int, RankGpus]) -> list[str]:
    """Return the GPUs of an engine's ranks, given by number. ConfigError if they cannot work together."""
    if len({each.machine for each in ranks.values()}) > 1:
        machines = "; ".join(f"rank {index} is on {each.machine.split()[0]}" for index, each in ranks.items())
        raise ConfigError(
            f"an engine needs its {len(ranks)} ranks along tp on one machine, and {machines}: "
            'use a smaller tp, or arrange the mesh with tp as its last axis and placement = "pack"'
        )
    gpus = [gpu for each in ranks.values() for gpu in each.gpus]
    if gpus and (len(set(gpus)) < len(gpus) or not all(each.gpus for each in ranks.values())):
        has = "; ".join(f"rank {index} has {', '.join(each.gpus) or 'none'}" for index, each in ranks.items())
        raise ConfigError(
            f"an engine of {len(ranks)} ranks along tp needs a separate GPU for each, and {has}: set gpus = 1 for "
            "the sampler's mesh"
        )
    return gpus
