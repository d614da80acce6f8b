"""Output of Ray's ranks, copied from Ray's files on each node to the files of the run."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshrl.engines.remote import Process, RankLog
from meshrl.mesh import boot_id

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from meshrl.engines.ray.code import Method

_PAUSE: Final = 1.0
"""Seconds between two checks of the files."""
_AT_ONCE: Final = 2**20
"""Most bytes of a file for each check. Of more, only the last ones are taken."""
_MARKS: Final = re.compile(rb"^:(?:job_id|actor_name|task_name):.*\n", re.MULTILINE)
"""Lines by which Ray marks the writer."""
_LAST: Final = 3.0
"""Seconds that a node has to deliver the last output of a dead rank."""


def read_on(files: Sequence[tuple[str, int]]) -> list[tuple[bytes, int]]:
    """Read these files of this machine, each from an offset. Returns the new bytes and the next offset."""
    return [_read_new(Path(file), since) for file, since in files]


def _read_new(file: Path, since: int) -> tuple[bytes, int]:
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            since = since if since <= size else 0  # Ray has started a new file
            opened.seek(max(since, size - _AT_ONCE))
            return _MARKS.sub(b"", opened.read()), opened.tell()
    except OSError:
        return b"", since


class LogReader:
    """Reads files on another node."""

    async def read_on(self, files: Sequence[tuple[str, int]]) -> list[tuple[bytes, int]]:
        """Call the function of this name."""
        return read_on(files)


class NodeLogs:
    """The ranks of one node. Files of this machine are read at once, others by an actor on the node."""

    def __init__(self, name: str, *, is_here: bool) -> None:
        self._name = name
        self._reader = None if is_here else _reader(name)
        self._ranks: WeakKeyDictionary[Process, dict[str, int]] = WeakKeyDictionary()
        """The offset that each file was read up to."""
        self._taking = asyncio.Lock()
        self._gone = False
        """True if the node did not answer, until it does."""
        self._task = asyncio.create_task(self._follow())

    def add(self, process: Process, files: Sequence[str], log: RankLog) -> None:
        """Follow another rank. The node of a new rank answers, so a lost reader is made again, for all its ranks."""
        self._ranks[process] = dict.fromkeys(files, 0)
        if self._reader is None:
            log.catch_up = self._take
        elif self._gone:
            self._task.cancel()
            self._reader, self._gone = _reader(self._name), False
            self._task = asyncio.create_task(self._follow())

    async def update(self) -> None:
        """Take new output."""
        if self._reader is None:
            self._take()
            return
        async with self._taking:
            wanted = self._wanted()
            read_on = cast("Method", self._reader.read_on)
            news = await read_on.remote([(file, since) for _, file, since in wanted])
            self._keep(wanted, cast("list[tuple[bytes, int]]", news))

    async def last(self) -> None:
        """Take the last output of a dead rank, if it comes within a moment."""
        if not self._gone:
            try:
                async with asyncio.timeout(_LAST):
                    await self.update()
            except (RayError, TimeoutError):
                self._gone = True

    async def close(self) -> None:
        """Take the remaining output, and drop the node."""
        self._task.cancel()
        await self.last()
        if self._reader is not None:
            with suppress(RayError):
                ray.kill(self._reader)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE)
            try:
                await self.update()
                self._gone = False
            except ActorUnavailableError:  # the connection broke; the reader may live
                self._gone = True
            except RayError:  # its ranks report it
                self._gone = True
                return

    def _take(self) -> None:
        wanted = self._wanted()
        self._keep(wanted, read_on([(file, since) for _, file, since in wanted]))

    def _wanted(self) -> list[tuple[Process, str, int]]:
        return [(process, file, since) for process, files in self._ranks.items() for file, since in files.items()]

    def _keep(self, wanted: Sequence[tuple[Process, str, int]], news: Sequence[tuple[bytes, int]]) -> None:
        for (process, file, _), (text, reached) in zip(wanted, news, strict=True):
            self._ranks[process][file] = reached
            if text and process.log:
                process.log.append(text)


def _reader(node: str) -> "ActorHandle[LogReader]":
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    reader = ray.remote(LogReader).options(num_cpus=0, scheduling_strategy=there, enable_task_events=False)
    return cast("ActorHandle[LogReader]", reader.remote())


class RankLogs:
    """The nodes with ranks whose logs are kept."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeLogs] = {}

    def follow(self, process: Process) -> None:
        """Copy all output of a process to its log, old and new."""
        place, log = process.known, process.log
        if place is None or log is None:
            return
        node = self._nodes.get(place.node)
        if node is None:
            node = self._nodes[place.node] = NodeLogs(place.node, is_here=place.boot == boot_id())
        log.begin(place.pid, place.host)
        node.add(process, place.files, log)

    async def last(self, node: str) -> None:
        """Take the last output of a node's ranks."""
        if node in self._nodes:
            await self._nodes[node].last()

    async def close(self) -> None:
        """Take the remaining output, and drop the nodes."""
        nodes, self._nodes = list(self._nodes.values()), {}
        await asyncio.gather(*(node.close() for node in nodes))
