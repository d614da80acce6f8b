"""Typed actors on ranks, and calls from one controller to many ranks.

An `Actor` is a plain class with `@endpoint` methods. Marks (`Shard`, `Gather`, ...) in their annotations are the
contract, which is read once at spawn. A `Mesh` reserves ranks of an `Engine`, the protocol below it, and spawns actors
there. A handle splits the arguments of each call over the ranks, and joins the results. Large columns stay on their
rank, behind references. The room does not depend on batches, models or a particular engine.
"""

from meshrl.mesh.actor import Actor, CollectiveActor, Rank, current_rank, endpoint, free_cores, rank_context
from meshrl.mesh.calls import Waiting, own_place, running_calls, slow_calls
from meshrl.mesh.engine import INLINE_BYTES, PATIENCE, Engine, Member, OnSpan, Request, Resources, Slot
from meshrl.mesh.handle import at, each, limited, respawn, stop
from meshrl.mesh.mesh import Mesh
from meshrl.mesh.partition import even_plan, lightest, plan_of
from meshrl.mesh.parts import is_away, leave_out, min_ranks, parts, planned, ranks, replicas, routed, streams, take_in
from meshrl.mesh.refs import ForAll, HasRefs, NotHere, Put, Ref, fetch, put_large, resolve, seal_arrays, when_here
from meshrl.mesh.scatter import Plan, Planner, make_plan
from meshrl.mesh.segment import Bytes, Segment, address_of
from meshrl.mesh.sharding import CP, DP, EP, EVERY, PP, TP, Array, Gather, Mean, Replicate, Rows, Same, Shard, Sum
from meshrl.mesh.shared_memory import Share, empty, in_transit, is_in_place, is_in_transit, note_transit, pool, sweep

__all__ = [
    "CP",
    "DP",
    "EP",
    "EVERY",
    "INLINE_BYTES",
    "PATIENCE",
    "PP",
    "TP",
    "Actor",
    "Array",
    "Bytes",
    "CollectiveActor",
    "Engine",
    "ForAll",
    "Gather",
    "HasRefs",
    "Mean",
    "Member",
    "Mesh",
    "NotHere",
    "OnSpan",
    "Plan",
    "Planner",
    "Put",
    "Rank",
    "Ref",
    "Replicate",
    "Request",
    "Resources",
    "Rows",
    "Same",
    "Segment",
    "Shard",
    "Share",
    "Slot",
    "Sum",
    "Waiting",
    "address_of",
    "at",
    "current_rank",
    "each",
    "empty",
    "endpoint",
    "even_plan",
    "fetch",
    "free_cores",
    "in_transit",
    "is_away",
    "is_in_place",
    "is_in_transit",
    "leave_out",
    "lightest",
    "limited",
    "make_plan",
    "min_ranks",
    "note_transit",
    "own_place",
    "parts",
    "plan_of",
    "planned",
    "pool",
    "put_large",
    "rank_context",
    "ranks",
    "replicas",
    "resolve",
    "respawn",
    "routed",
    "running_calls",
    "seal_arrays",
    "slow_calls",
    "stop",
    "streams",
    "sweep",
    "take_in",
    "when_here",
]
