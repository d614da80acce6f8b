"""Jobs whose ranks write, and die."""

import asyncio
import ctypes
from pathlib import Path

from meshrl import Actor, Mesh, RankDied, endpoint, respawn
from meshrl.engines.ray import RayEngine
from tests.cluster.jobs import on, say

LOGS = Path("/tmp/meshrl-test-logs")  # noqa: S108 -- each host's own


class Talks(Actor):
    """Writes, and dies."""

    @endpoint
    async def say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201 -- what is tested

    @endpoint
    async def die(self) -> None:
        print("last words", flush=True)  # noqa: T201 -- what is tested
        ctypes.string_at(0)


async def written(engine: RayEngine, host: str) -> object:
    """A rank on this host writes and dies: what the error tells, and the file on this one."""
    talks = await (await Mesh.reserve(engine, 1, on(host), "far", str(LOGS))).spawn(Talks)
    await talks.say("hello from there")
    try:
        await talks.die()
    except RankDied as died:
        return str(died), (LOGS / "far-0.log").read_text()
    raise AssertionError("it lives")


async def written_until_the_host_died(engine: RayEngine, host: str) -> object:
    """A rank writes, and its host is killed when that is here: what the error tells."""
    talks = await (await Mesh.reserve(engine, 1, on(host), "dead", str(LOGS))).spawn(Talks)
    await talks.say("hello from there")
    while "hello from there" not in (LOGS / "dead-0.log").read_text():  # noqa: ASYNC110 -- the folder of another process
        await asyncio.sleep(0.1)
    say("ready")
    try:
        while True:
            await talks.say("more")
            await asyncio.sleep(0.05)
    except RankDied as died:
        return str(died)


async def written_after_a_cut(engine: RayEngine, host: str) -> object:
    """A rank writes until its host is given up, and again as it is made anew: its log."""
    talks = await (await Mesh.reserve(engine, 1, on(host), "cut", str(LOGS))).spawn(Talks)
    say("ready")
    try:
        while True:
            await talks.say("before")
            await asyncio.sleep(0.05)
    except RankDied:
        say("RankDied")
    await respawn(talks)
    await talks.say("hello after the cut")
    while "hello after the cut" not in (text := (LOGS / "cut-0.log").read_text()):  # noqa: ASYNC110 -- as above
        await asyncio.sleep(0.1)
    return text
