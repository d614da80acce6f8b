"""Calls and data between processes of one machine: frames on Unix sockets, and values in shared memory.

A `Server` answers for a `Host` on a socket that only its user may open. A `SocketChannel` reaches it from another
process. `PoolRef.put` writes large values once into shared memory, and readers map them.
"""

from meshrl.engines.transport.channel import Address, SocketChannel
from meshrl.engines.transport.connection import Connection
from meshrl.engines.transport.folder import remove_folder, socket_folder
from meshrl.engines.transport.frames import TOKEN_BYTES
from meshrl.engines.transport.pool_ref import PoolRef
from meshrl.engines.transport.server import Server, listen

__all__ = [
    "TOKEN_BYTES",
    "Address",
    "Connection",
    "PoolRef",
    "Server",
    "SocketChannel",
    "listen",
    "remove_folder",
    "socket_folder",
]
