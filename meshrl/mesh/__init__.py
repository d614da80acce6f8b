"""TODO-room."""

from meshrl.mesh.actor import Actor, Rank, Together, current_rank, endpoint, free_cores, rank_context
from meshrl.mesh.engine import INLINE_BYTES, Engine, Member, Request, Resources, Seen, Slot
from meshrl.mesh.handle import at, divided, each, parts, ranks, respawn, stop
from meshrl.mesh.mesh import Mesh
from meshrl.mesh.refs import Held, Holder, Put, fetched, hold, loaded, seal_arrays
from meshrl.mesh.scatter import lightest, plan_of
from meshrl.mesh.sharding import CP, DP, EP, EVERY, PP, TP, Array, Gather, Mean, Replicate, Rows, Same, Shard, Sum
from meshrl.mesh.shared_memory import Bytes, Segment, pool, sweep

__all__ = [
    "Actor",
    "Array",
    "Bytes",
    "CP",
    "DP",
    "EP",
    "EVERY",
    "Engine",
    "Gather",
    "Held",
    "Holder",
    "INLINE_BYTES",
    "Mean",
    "Member",
    "Mesh",
    "PP",
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
    "TP",
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
