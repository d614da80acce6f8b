"""Typed actors on ranks, and how a call crosses from one controller to many of them.

An `Actor` is a plain class whose `@endpoint` methods a mesh may call; marks (`Shard`, `Gather`, ...) in their
annotations are the contract, read once at spawn. `Mesh` reserves ranks of an `Engine`, the protocol below it, and
spawns actors there; a handle splits each call's arguments over the ranks and joins what they return. Large columns
stay on their rank behind references. The room knows no batch, no model and no engine.
"""

from meshrl.mesh.actor import Actor, Rank, Together, current_rank, endpoint, free_cores, rank_context
from meshrl.mesh.engine import INLINE_BYTES, Engine, Member, Request, Resources, Seen, Slot
from meshrl.mesh.handle import at, divided, each, parts, ranks, respawn, stop
from meshrl.mesh.mesh import Mesh
from meshrl.mesh.refs import Held, Holder, Put, fetched, hold, loaded, seal_arrays
from meshrl.mesh.scatter import lightest, plan_of
from meshrl.mesh.sharding import CP, DP, EP, EVERY, PP, TP, Array, Gather, Mean, Replicate, Rows, Same, Shard, Sum
from meshrl.mesh.shared_memory import Bytes, Segment, pool, sweep

__all__ = [
    "CP",
    "DP",
    "EP",
    "EVERY",
    "INLINE_BYTES",
    "PP",
    "TP",
    "Actor",
    "Array",
    "Bytes",
    "Engine",
    "Gather",
    "Held",
    "Holder",
    "Mean",
    "Member",
    "Mesh",
    "Put",
    "Rank",
    "Replicate",
    "Request",
    "Resources",
    "Rows",
    "Same",
    "Seen",
    "Segment",
    "Shard",
    "Slot",
    "Sum",
    "Together",
    "at",
    "current_rank",
    "divided",
    "each",
    "endpoint",
    "fetched",
    "free_cores",
    "hold",
    "lightest",
    "loaded",
    "parts",
    "plan_of",
    "pool",
    "rank_context",
    "ranks",
    "respawn",
    "seal_arrays",
    "stop",
    "sweep",
]
