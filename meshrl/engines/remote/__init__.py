"""Ranks that are processes, regardless of how they are started: both ends of a call, and the actors.

A `Caller` sends calls through the `Channel` of each rank's `Process`. The controller's `RemoteEngine` is a caller, and
each rank that holds a handle has one. The `Host` in the process keeps the order of calls, runs them and answers.

On one machine, a `Server` answers for the `Host` on a socket that only its user may open, a `SocketChannel` reaches it,
and `PoolRef.put` writes large values once into shared memory, which readers map.
"""

from meshrl.engines.remote.caller import Process as Process, clock_ahead as clock_ahead
from meshrl.engines.remote.engine import (
    ProcessSlot as ProcessSlot,
    RemoteEngine as RemoteEngine,
    Reservation as Reservation,
    environments as environments,
)
from meshrl.engines.remote.host import Host as Host, work_as as work_as
from meshrl.engines.remote.host_monitor import (
    PROBES as PROBES,
    HostMonitor as HostMonitor,
    is_reachable as is_reachable,
    monitor_of as monitor_of,
)
from meshrl.engines.remote.logs import LogFolder as LogFolder, RankLog as RankLog
from meshrl.engines.remote.messages import (
    NO_ARGUMENTS as NO_ARGUMENTS,
    Arguments as Arguments,
    Call as Call,
    Channel as Channel,
    HealthPort as HealthPort,
    MessageLost as MessageLost,
    Pickler as Pickler,
    Place as Place,
    ProcessExited as ProcessExited,
    Reply as Reply,
    Service as Service,
    Stopped as Stopped,
    register_pickler as register_pickler,
)
from meshrl.engines.remote.pool_ref import PoolRef as PoolRef
from meshrl.engines.remote.sockets import (
    TOKEN_BYTES as TOKEN_BYTES,
    Address as Address,
    Connection as Connection,
    Server as Server,
    SocketChannel as SocketChannel,
    listen as listen,
    remove_folder as remove_folder,
    socket_folder as socket_folder,
)
