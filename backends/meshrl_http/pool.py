"""A rank's servers as one engine, in one event loop: it converts orders to requests, and passes on the answers.

Rows wait here until a server has room. An unresponsive server is tried again later, and its rows continue elsewhere.
New weights are loaded while nothing is sampled: running requests end as they are, and continue after their tokens with
the new weights. So each token's version is known, whatever a server reports.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, repeat
from typing import Any, Final, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshrl import log
from meshrl.errors import EngineDied, MeshrlError, ModelError, described
from meshrl_http.client import NoAnswerError
from meshrl_http.dialects import Ask, Piece
from meshrl_http.folders import Folders
from meshrl_http.row import Decoded
from meshrl_http.server import Running, Server
from meshrl_inference.engine_side.loading import Specs, refusal
from meshrl_inference.engine_side.protocol import Abort, Answer, Done, Generate, Load, Loaded, Order, Refused, Rows

_HELD: Final = 0.02
"""Seconds between two messages of rows, as of an engine's process."""
_AGAIN: Final = 0.05
"""Seconds after which unfinished requests are aborted again, because a server may not have known them."""
_SELDOM: Final = 1.0
"""Most seconds between two such aborts. Each wait is twice as long as the last."""


class Model(NamedTuple):
    """The model of the servers, as a trainer has it."""

    tokenizer: PreTrainedTokenizerBase
    known: Specs
    tolerance: float
    """Largest mean difference of log-probs of the same weights."""


class Pool:
    """The requests to the servers, and their recipients."""

    def __init__(
        self,
        servers: Sequence[Server],
        folders: Folders | None,
        session: str,
        model: Model,
        patience: float,
        tell: Callable[[Answer], None],
        ended: Callable[[ModelError], None],
    ) -> None:
        self.servers: Final = servers
        self._folders, self._session, self._model = folders, session, model
        self._patience, self._tell, self._ended = patience, tell, ended
        self._waiting: deque[Decoded] = deque()
        self._rows: dict[int, Decoded] = {}
        self._done: list[Done] = []
        self._tasks = set[asyncio.Task[None]]()
        self._loading = asyncio.Lock()
        self._held = False
        """True if no row may be sent, because new weights are being loaded."""
        self._version = 0
        self._gifts = 0
        """Number of times that weights were given to servers."""
        self._given = ""
        """The folder of the present weights. Empty if none were given."""
        self._probe: Sequence[list[int]] = ()
        self._read: list[float] = []
        """The servers' log-probs of the probe."""
        self._pieces = 0
        self._closed = False

    async def begin(self) -> None:
        """Load the weights of the model's folder into the servers, which an earlier run may have changed."""
        if self._folders:
            await self._give(await asyncio.to_thread(self._folders.of_model), 0, ())

    def take(self, order: Order) -> None:
        """Start an order."""
        if self._closed:
            return
        if isinstance(order, Generate):
            for server in self.servers:
                server.sure = False  # it may have been restarted while it was idle
            for row in order.rows:
                self._rows[row.number] = decoded = Decoded(row, order)
                self._waiting.append(decoded)
            self._fill()
        elif isinstance(order, Abort):
            self._leave({number for number in order.rows if number in self._rows}, told=order.wanted)
        else:
            self._start(self._load(order))

    def end(self, error: ModelError) -> None:
        """Stop all requests, and fail all waiting tasks."""
        if not self._closed:
            self._ended(error)
            self.drop()

    def drop(self) -> None:
        """Stop all requests."""
        self._closed = True
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Close all connections."""
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.servers:
            await server.client.close()

    def _fill(self) -> None:
        """Send waiting rows to servers with room, the one with the fewest rows first."""
        while self._waiting and not self._held and not self._closed:
            free = [server for server in self.servers if server.has_room]
            if not free:
                return
            server, row = min(free, key=lambda each: len(each.running)), self._waiting.popleft()
            ask = row.ask(self._session, f"{self._session}-{self._gifts}")
            task = self._task(self._decode(server, row, ask))
            server.running[ask.name] = Running(row.row.number, task)
            task.add_done_callback(partial(self._decoded, server, row, ask.name))

    async def _decode(self, server: Server, row: Decoded, ask: Ask) -> None:
        """Let a server decode a row to its end. If cancelled, the row keeps its earlier tokens."""
        try:
            piece = await self._drawn(server, row, ask)
        except NoAnswerError as error:
            self._missed(server, error)
        else:
            self._pieces += 1
            row.take(piece, self._version, self._model.tokenizer)

    def _decoded(self, server: Server, row: Decoded, name: str, task: asyncio.Task[None]) -> None:
        """Handle the end of a request. If its row has to continue, it waits again."""
        del server.running[name]
        if not self._closed:
            if row.row.number in self._rows:
                self._go_on(row)
            self._fill()

    async def _drawn(self, server: Server, row: Decoded, ask: Ask) -> Piece:
        """Return what a server samples. ModelError if it used other weights than it was given."""
        await self._make_sure(server)
        piece = await server.dialect.draw(server.client, server.found.model, ask)
        if self._given and piece.tag not in (None, self._tag):
            raise ModelError(
                f"{server.url} has drawn with the weights {piece.tag!r}, and was given {self._tag!r}: another program "
                "gives it weights too. A server must belong to one sampler"
            )
        if not piece.tokens and not row.told and not self._held:
            raise NoAnswerError("it ends requests before it has begun them")
        server.answered()
        return piece

    def _go_on(self, row: Decoded) -> None:
        if row.reason is None:
            self._waiting.appendleft(row)
            return
        del self._rows[row.row.number]
        self._done.append(row.done())
        if len(self._done) == 1:
            asyncio.get_running_loop().call_later(_HELD, self._tell_rows)

    def _tell_rows(self) -> None:
        done, self._done = self._done, []
        self._tell(Rows(done))

    def _leave(self, numbers: set[int], *, told: bool) -> None:
        """End rows. With `told`, they are returned as they are."""
        waited = [row for row in self._waiting if row.row.number in numbers]
        self._waiting = deque(row for row in self._waiting if row.row.number not in numbers)
        if told:
            for number in numbers:
                self._rows[number].told = True
            for row in waited:
                self._go_on(row)
            self._start(self._interrupt(numbers))
            return
        for number in numbers:
            del self._rows[number]
        for server in self.servers:
            left = {name: each for name, each in server.running.items() if each.row in numbers}
            for each in left.values():
                each.task.cancel()
            if left:
                self._start(self._forget(server, list(left)))

    async def _forget(self, server: Server, names: Sequence[str]) -> None:
        """Abort requests whose connections are closed, because servers may notice that late."""
        with suppress(NoAnswerError):
            await server.dialect.abort(server.client, names)

    async def _interrupt(self, numbers: set[int] | None = None) -> None:
        """End the requests of some or all rows as they are, and wait until they have ended."""
        for pause in accumulate(repeat(_AGAIN), lambda before, _: min(2 * before, _SELDOM)):
            running = {
                server: {name: each for name, each in server.running.items() if numbers is None or each.row in numbers}
                for server in self.servers
            }
            if not any(running.values()):
                return
            await asyncio.gather(*(self._abort(server, each) for server, each in running.items() if each))
            tasks = [each.task for some in running.values() for each in some.values()]
            await asyncio.wait(tasks, timeout=pause)

    async def _abort(self, server: Server, running: Mapping[str, Running]) -> None:
        """End requests. If a server cannot do that, their tokens are lost."""
        try:
            asked = await server.dialect.abort(server.client, list(running))
        except NoAnswerError:
            asked = False
        if not asked:
            for each in running.values():
                each.task.cancel()

    async def _load(self, order: Load) -> None:
        """Write new weights to a folder, and load them into all servers."""
        async with self._loading:
            if self._folders is None:
                self._tell(Refused("sampler.http.weights is not set, and so the servers' weights stay as they are"))
                return
            if (refused := await asyncio.to_thread(refusal, self._model.known, order)) is not None:
                self._tell(Refused(refused))
                return
            name = f"version-{order.version}-{self._gifts}"
            try:
                folder = await asyncio.to_thread(self._folders.of, name, order.buckets)
            except OSError as error:
                self._tell(Refused(f"they cannot be written into sampler.http.weights: {error}"))
                return
            began = time.monotonic()
            values = await self._give(folder, order.version, order.probe)
            seconds = time.monotonic() - began
            self._tell(Loaded(order.version, self._pieces, seconds, np.array(values, np.float32).tobytes()))
            await asyncio.to_thread(self._folders.keep, folder)

    async def _give(self, folder: str, version: int, probe: Sequence[list[int]]) -> list[float]:
        """Load weights into the servers, and return their log-probs of a probe.

        A server that does not answer loads them before it samples again. At least one has to answer.
        """
        self._held = True
        await self._interrupt()
        renewals = [each.making_sure for each in self.servers if each.making_sure is not None]
        await asyncio.gather(*renewals, return_exceptions=True)  # earlier weights, for rows that have ended
        self._given, self._version, self._probe, self._read = folder, version, probe, []
        self._gifts += 1
        for server in self.servers:
            server.sure = False
        given = False
        while not given and not self._closed:
            given = any(await asyncio.gather(*map(self._tried, self.servers)))
            if not given:
                await asyncio.sleep(max(0.0, min(each.next_try for each in self.servers) - time.monotonic()))
        self._held = False
        self._fill()
        return self._read

    async def _tried(self, server: Server) -> bool:
        """Try to bring a server to the right weights. True if it has them."""
        try:
            await self._make_sure(server)
        except NoAnswerError as error:
            self._missed(server, error)
            return False
        server.answered()
        return True

    async def _make_sure(self, server: Server) -> None:
        """Make sure that a server has the latest weights, once for all waiting tasks."""
        if server.sure:
            return
        if server.making_sure is None or server.making_sure.done():
            server.making_sure = asyncio.ensure_future(self._renewed(server))
            server.making_sure.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(server.making_sure)

    async def _renewed(self, server: Server) -> None:
        dialect, client = server.dialect, server.client
        if self._given and await dialect.tag(client) != self._tag:
            if server.gifts == self._gifts:
                log.warning(
                    f"{server.url} has other weights than it was given, as after a restart: weights are sent again"
                )
            await self._update(server)
            read = [dialect.read(client, server.found.model, tokens, f"{self._tag}-probe") for tokens in self._probe]
            values = [value for row in await asyncio.gather(*read) for value in row]
            self._read = self._read or values
            apart = float(np.abs(np.subtract(values, self._read)).mean()) if values else 0.0
            if not apart <= self._model.tolerance:
                raise ModelError(
                    f"{server.url} makes something else of the weights of version {self._version} than another server "
                    f"did, or itself before: log-probs are {apart:.3g} apart (at most {self._model.tolerance:g})"
                )
            server.gifts = self._gifts
        elif not self._given:
            await client.get("/v1/models")
        server.sure = True

    @property
    def _tag(self) -> str:
        """The servers' tag for the latest weights."""
        return f"{self._session}-{self._gifts}-version-{self._version}"

    async def _update(self, server: Server) -> None:
        try:
            await server.dialect.update(server.client, self._given, self._tag)
        except (ModelError, NoAnswerError) as error:
            if isinstance(error, NoAnswerError) and error.status != 500:
                raise
            raise ModelError(
                f"{server.url} does not take the weights in {self._given}: {error}. Does it see that folder under "
                "this path? sampler.http.weights must name a folder that ranks and servers share"
            ) from None

    def _missed(self, server: Server, error: NoAnswerError) -> None:
        """Try a server again later. Fails the sampler if no server has answered for long."""
        server.missed(error)
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, server.next_try - time.monotonic()), self._fill)
        if all(each.silence > self._patience for each in self.servers):
            self.end(silent(self.servers, self._patience))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(self._task(work))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose errors fail the sampler."""

        async def guarded() -> None:
            try:
                await work
            except MeshrlError as error:
                self.end(error if isinstance(error, ModelError) else ModelError(str(error)))
            except Exception as error:  # noqa: BLE001 -- any bad answer is reported to all that wait
                self.end(ModelError(f"a server's answer cannot be read: {described(error)}"))

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task


def silent(servers: Sequence[Server], patience: float) -> EngineDied:
    """Return the error for servers that have not answered for long."""
    told = "; ".join(each.told() for each in servers)
    return EngineDied(
        f"no answer from {told} (sampler.http.patience = {patience:g}): start a server, or name others in "
        "sampler.http.urls, and respawn the sampler"
    )
