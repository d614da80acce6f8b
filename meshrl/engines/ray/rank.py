"""The Ray actor that is a rank's process."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from secrets import token_bytes
from typing import cast

import ray

from meshrl.engines.hosting import NO_ARGUMENTS, Arguments, Construction, Failure, Host, Place, Stopped
from meshrl.engines.ray.channel import current_ask
from meshrl.engines.ray.refs import HostRef
from meshrl.engines.transport import TOKEN_BYTES, Server, listen


class RankProcess:
    """One process for one rank of a mesh: a `Host`, whose calls are the tasks of a Ray actor."""

    def __init__(self, folder: str, paths: Sequence[str], inline_bytes: int, shares_memory: bool) -> None:
        # As in the controller's process: relative files, and modules next to a script.
        if Path(folder).is_dir():
            os.chdir(folder)
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # only what is mapped at once is fetched so
        sys.path += [path for path in paths if path not in sys.path]
        self._host = Host(HostRef.put, inline_bytes, shares_memory)
        self._socket: tuple[str, bytes] | None = None

    async def place(self) -> Place:
        """Where this is, and a free port."""
        self._host.keep_loop()
        if self._socket is None:
            path, token = Path(tempfile.mkdtemp(prefix="meshrl-run-"), "rank"), token_bytes(TOKEN_BYTES)
            Server(listen(path), token, self._host)
            self._socket = str(path), token
        ip = cast("str", ray.util.get_node_ip_address())
        node = ray.get_runtime_context().get_node_id()
        return (await self._host.place())._replace(ip=ip, node=node, socket=self._socket)

    async def clock(self) -> float:
        """Seconds on this machine's clock."""
        return await self._host.clock()

    async def construct(self, wanted: Construction) -> Failure | Stopped | None:
        """Make an actor."""
        return await self._host.construct(wanted)

    async def call(self, given: Arguments = NO_ARGUMENTS) -> object:
        """Call the endpoint that the task's name says."""
        return await self._host.call(current_ask(self._host.whole), given)

    async def stream(self, given: Arguments = NO_ARGUMENTS) -> object:
        """Run the generator that the task's name says to its end; `next` gives its values."""
        return await self._host.stream(current_ask(self._host.whole), given)

    async def next(self, line: str, number: int) -> object:
        """The next value of a stream."""
        return await self._host.next(line, number)

    async def cancel(self, line: str, number: int) -> None:
        """Cancel a call or close a stream, also one that has not arrived yet."""
        self._host.cancel(line, number)

    async def stop(self, key: str, attempt: int) -> None:
        """Cancel an actor's calls, wait for their end, and let it go."""
        await self._host.stop(key, attempt)

    async def leave(self) -> None:
        """The mesh goes: give back memory that would outlive this process, which is killed now."""
        self._host.leave()
