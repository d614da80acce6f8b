"""A server of tools that counts: by stdio, or by HTTP at a port."""

import asyncio
import itertools
import os
import sys

from mcp.server import MCPServer

server = MCPServer("counting")
calls = itertools.count(1)


@server.tool()
async def following(number: int) -> str:
    """The number that follows."""
    return str(number + 7)


@server.tool()
async def counted() -> str:
    """How often this process was asked."""
    return f"{next(calls)}. " + "x" * 100


@server.tool()
async def hangs() -> str:
    """Gives no answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
async def dies() -> str:
    """Ends the server."""
    os._exit(1)


if len(sys.argv) > 1:
    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    server.run()
