"""Handles of a policy and a sampler that a server of the Tinker API has, so that a page runs unchanged against it.

`connect` opens a session at `meshrl tinker`. The handles have the types of the roles. They speak the API's own requests
for sessions and checkpoints, and verbs of meshrl, with whole batches, for the rest.
"""

from meshrl.remote.handles import (
    Remote as Remote,
    RemotePolicy as RemotePolicy,
    RemoteSampler as RemoteSampler,
    connect as connect,
)
from meshrl.remote.messages import (
    MSGPACK as MSGPACK,
    Call as Call,
    Generate as Generate,
    Made as Made,
    Packed as Packed,
)
