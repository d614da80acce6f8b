"""Typed actors on ranks, and calls from one controller to many ranks.

An `Actor` is a plain class with `@endpoint` methods. Marks (`Shard`, `Gather`, ...) in their annotations are the
contract, which is read once at spawn. A `Mesh` reserves ranks of an `Engine`, the protocol below it, and spawns actors
there. A handle splits the arguments of each call over the ranks, and joins the results. Large columns stay on their
rank, behind references. The room does not depend on batches, models or a particular engine.
"""

from meshrl.mesh.actor import (
    Actor as Actor,
    CollectiveActor as CollectiveActor,
    Rank as Rank,
    boot_id as boot_id,
    current_rank as current_rank,
    endpoint as endpoint,
    free_cores as free_cores,
    rank_context as rank_context,
)
from meshrl.mesh.engine import (
    INLINE_BYTES as INLINE_BYTES,
    PATIENCE as PATIENCE,
    Engine as Engine,
    Member as Member,
    OnSpan as OnSpan,
    Request as Request,
    Resources as Resources,
    Slot as Slot,
)
from meshrl.mesh.gpus import (
    MachineGpus as MachineGpus,
    gpu_name as gpu_name,
    machine_gpus as machine_gpus,
    visible_gpus as visible_gpus,
)
from meshrl.mesh.handle import (
    Waiting as Waiting,
    at as at,
    each as each,
    is_away as is_away,
    leave_out as leave_out,
    limited as limited,
    min_ranks as min_ranks,
    own_place as own_place,
    parts as parts,
    planned as planned,
    ranks as ranks,
    replicas as replicas,
    respawn as respawn,
    routed as routed,
    running_calls as running_calls,
    slow_calls as slow_calls,
    stop as stop,
    streams as streams,
    take_in as take_in,
)
from meshrl.mesh.mesh import Mesh as Mesh
from meshrl.mesh.refs import (
    ForAll as ForAll,
    HasRefs as HasRefs,
    NotHere as NotHere,
    Put as Put,
    Ref as Ref,
    fetch as fetch,
    in_transit as in_transit,
    is_in_transit as is_in_transit,
    note_transit as note_transit,
    put_large as put_large,
    resolve as resolve,
    seal_arrays as seal_arrays,
    when_here as when_here,
)
from meshrl.mesh.scatter import (
    Plan as Plan,
    Planner as Planner,
    even_plan as even_plan,
    lightest as lightest,
    make_plan as make_plan,
    plan_of as plan_of,
)
from meshrl.mesh.segment import Bytes as Bytes, Segment as Segment, address_of as address_of
from meshrl.mesh.sharding import (
    CP as CP,
    DP as DP,
    EVERY as EVERY,
    PP as PP,
    TP as TP,
    Array as Array,
    Gather as Gather,
    Mean as Mean,
    Replicate as Replicate,
    Rows as Rows,
    Same as Same,
    Shard as Shard,
    Sum as Sum,
)
from meshrl.mesh.shared_memory import (
    Share as Share,
    empty as empty,
    is_in_place as is_in_place,
    pool as pool,
    sweep as sweep,
)
