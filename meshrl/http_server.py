"""What servers of HTTP in this process have in common: the page of a run, the gateway, and the Tinker API."""

import gc
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

import uvicorn

from meshrl.errors import ConfigError


class HttpServer(uvicorn.Server):
    """A server that leaves signals to the command or the script."""

    _serving: ClassVar[int] = 0
    """Number of servers in this process."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve. Until the last server ends, garbage collections pass over what was there before the first.

        That is mostly libraries. What of it is dropped in a cycle stays in memory until then.
        """
        if not HttpServer._serving:
            gc.collect()
            gc.freeze()
        HttpServer._serving += 1
        try:
            await super().serve(sockets)
        finally:
            HttpServer._serving -= 1
            if not HttpServer._serving:
                gc.unfreeze()


def listen(host: str, port: int, remedy: str = "take another port") -> socket.socket:
    """Return a socket that listens. ConfigError if the address is not available, with the `remedy`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"port {port} of {host}: {error.strerror}: {remedy}") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which asyncio leaves out for such a socket
    return listening
