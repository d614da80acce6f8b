"""A rank's servers as one engine: it converts orders to requests, and passes on the answers.

Rows wait here until a server has room. An unresponsive server is tried again later, and its rows continue elsewhere.
New weights are loaded while nothing is sampled: running requests end as they are, and continue after their tokens with
the new weights. So each token's version is known, whatever a server reports.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from transformers import AutoConfig

from meshrl import log
from meshrl.errors import ConfigError, EngineDied, MeshrlError, ModelError, described
from meshrl.roles import SamplerConfig, Sampling, options_of
from meshrl_http.client import Client, NoAnswerError
from meshrl_http.dialects import Dialect, DrawRequest, Piece
from meshrl_http.folders import Folders
from meshrl_http.options import HttpConfig
from meshrl_http.row import Decoded
from meshrl_http.server_discovery import ServerInfo, find, no_weights
from meshrl_inference.engine_side.loading import Naming, refusal
from meshrl_inference.engine_side.protocol import (
    Abort,
    Answer,
    FinishedRow,
    Generate,
    Load,
    Loaded,
    Order,
    Refused,
    Rows,
)
from meshrl_inference.process import EngineConnection
from meshrl_torch.model.text import Words
from meshrl_torch.weights.transfer import TOLERANCE

T = TypeVar("T")

_SOON: Final = 0.2
_LATE: Final = 10.0
"""Seconds between two attempts at first, and at most."""
_BESIDE: Final = 16
"""Connections to a server in addition to those of its rows."""
_GRACE: Final = 5.0
"""Seconds for closing connections."""
_HELD: Final = 0.02
"""Seconds between two messages of rows, as of an engine's process."""
_AGAIN: Final = 0.05
"""Seconds after which unfinished requests are aborted again, because a server may not have known them."""
_SELDOM: Final = 1.0
"""Most seconds between two such aborts. Each wait is twice as long as the last."""


class Running(NamedTuple):
    """A request for a row."""

    row: int
    """The row's number."""
    task: asyncio.Task[None]


class Server:
    """The state of a server, for use in one event loop."""

    def __init__(self, client: Client, slots: int) -> None:
        self.client: Final = client
        self.url: Final = client.url
        self._slots = slots
        self.info: ServerInfo
        """Its properties, which are asked for before anything else."""
        self.running: Final[dict[str, Running]] = {}
        """Requests for rows, by name."""
        self.sure = False
        """True if it is known to have the given weights. False after missing answers, or an idle time."""
        self.loads = 0
        """The number of its weights, counting those given to servers. 0 if it has none."""
        self.making_sure: asyncio.Task[None] | None = None
        self.silent_since: float | None = None
        """Time of the first missing answer on the clock `time.monotonic`. None if it answers."""
        self.next_try = 0.0
        self._wait = _SOON
        self._why = ""

    @property
    def dialect(self) -> Dialect:
        """Its kind of requests."""
        return self.info.dialect

    @property
    def has_room(self) -> bool:
        """True if a row may be sent there."""
        return len(self.running) < self._slots and time.monotonic() >= self.next_try

    @property
    def silence(self) -> float:
        """Seconds without an answer, since the first that was missing."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def answered(self) -> None:
        """Note an answer."""
        if self.silent_since is not None:
            log.info(f"{self.url} answers again", seconds=f"{self.silence:.1f}")
        self.silent_since, self.next_try, self._wait = None, 0.0, _SOON

    def missed(self, error: NoAnswerError) -> None:
        """Note a missing answer, and try again later."""
        now = time.monotonic()
        self.sure = False
        if self.silent_since is None:
            self.silent_since, self._why = now, str(error)
            log.warning(f"{self.url} does not answer, and is asked again: {error}")
        if now >= self.next_try:  # only once for all rows that were there
            self.next_try = now + max(self._wait, error.after)
            self._wait = min(2 * self._wait, _LATE)

    def state(self) -> str:
        """Describe since when it does not answer, and why."""
        return f"{self.url} for {self.silence:.0f} s: {self._why}"

    async def insist(self, ask: Callable[[], Awaitable[T]], patience: float) -> T:
        """Repeat a request until it is answered. NoAnswerError after `patience` seconds."""
        while True:
            try:
                answer = await ask()
            except NoAnswerError as error:
                self.missed(error)
                if self.silence > patience:
                    raise
                await asyncio.sleep(max(0.0, self.next_try - time.monotonic()))
            else:
                self.answered()
                return answer


class Servers(EngineConnection):
    """External servers as an engine. Its requests run in an event loop in a separate thread."""

    def __init__(self, config: SamplerConfig, urls: Sequence[str], folder: Path, words: Words) -> None:
        """EngineDied if a server does not answer, ModelError or ConfigError if it cannot be used."""
        super().__init__()
        self.tokens = int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
        self._options = options = options_of(config, HttpConfig)
        self._words, key = words, options.key()
        naming, self._session = Naming(str(folder)), f"meshrl-{secrets.token_hex(6)}"
        self._specs, self._tolerance = naming.specs(config.dtype), TOLERANCE[config.dtype]
        self._folders = Folders(options.weights, self._session, folder, naming) if options.weights else None
        self._servers: Sequence[Server] = ()
        self._waiting: deque[Decoded] = deque()
        self._rows: dict[int, Decoded] = {}
        self._done: list[FinishedRow] = []
        self._tasks = set[asyncio.Task[None]]()
        self._loading = asyncio.Lock()
        self._held = False
        """True if no row may be sent, because new weights are being loaded."""
        self._version = 0
        self._number = 0
        """The sampler's number of the load of these weights."""
        self._loads = 0
        """Number of times that weights were given to servers."""
        self._given = ""
        """The folder of the present weights. Empty if none were given."""
        self._probe: Sequence[list[int]] = ()
        self._read: list[float] = []
        """The servers' log-probs of the probe."""
        self._pieces = 0
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshrl-http", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._begin(urls, key, config.slots), self._loop).result()
        except BaseException:
            self.close()
            raise

    async def _begin(self, urls: Sequence[str], key: str | None, slots: int) -> None:
        """Query the servers, and load the weights of the model's folder, which an earlier run may have changed."""
        self._servers = [Server(Client(url, key, slots + _BESIDE), slots) for url in urls]
        await asyncio.gather(*map(self._discover, self._servers))
        if self._folders:
            await self._send_weights(await asyncio.to_thread(self._folders.of_model), 0, 0, ())
        if self._end is not None:
            raise self._end

    async def _discover(self, server: Server) -> None:
        patience = self._options.patience
        try:
            server.info = await server.insist(lambda: find(server.client, self._options.model), patience)
        except NoAnswerError:
            raise silent([server], patience) from None
        log.info(f"{server.url}: {server.info}")
        if self._folders and not server.info.takes_weights:
            raise ConfigError(no_weights(server.url))

    @property
    def max_tokens(self) -> int:
        """The longest sequence that all of them accept."""
        return min((each.info.longest for each in self._servers if each.info.longest), default=1 << 62)

    def check(self, sampling: Sampling) -> None:
        """Raise DataError if a server cannot sample this way."""
        for server in self._servers:
            server.info.check(server.url, sampling)

    def send(self, order: Order) -> None:
        """Send an order. Raises the error that ended the servers' use."""
        if self._end is not None:
            raise self._end
        self._loop.call_soon_threadsafe(self._take, order)

    def fail(self, error: ModelError) -> None:
        """End the use of the servers with this error."""
        self._end = self._end or error
        self._loop.call_soon_threadsafe(self._drop)

    def close(self) -> None:
        """End the use of the servers. They keep running, with their weights."""
        self._end = self._end or ModelError("the sampler of these servers was stopped")
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join(_GRACE)
            if not self._thread.is_alive():
                self._loop.close()
        if self._folders:
            self._folders.remove()

    async def _stop(self) -> None:
        self._drop()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for server in self._servers:
                await server.client.aclose()
        finally:
            self._loop.stop()

    def _take(self, order: Order) -> None:
        if self._closed:
            return
        if isinstance(order, Generate):
            for server in self._servers:
                server.sure = False  # it may have been restarted while it was idle
            for row in order.rows:
                self._rows[row.number] = decoded = Decoded(row, order)
                self._waiting.append(decoded)
            self._fill()
        elif isinstance(order, Abort):
            self._leave({number for number in order.rows if number in self._rows}, wanted=order.wanted)
        elif isinstance(order, Load):
            self._tasks.add(self._task(self._load(order)))

    def _fail(self, error: ModelError) -> None:
        if not self._closed:
            self._end = self._end or error
            self._call_soon(partial(self._on_end, self._end))
            self._drop()

    def _drop(self) -> None:
        self._closed = True
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _reply(self, answer: Answer) -> None:
        self._call_soon(partial(self._on_answer, answer))

    def _fill(self) -> None:
        """Send waiting rows to servers with room, the one with the fewest rows first."""
        while self._waiting and not self._held and not self._closed:
            free = [server for server in self._servers if server.has_room]
            if not free:
                return
            server, row = min(free, key=lambda each: len(each.running)), self._waiting.popleft()
            request = row.request(self._session, f"{self._session}-{self._loads}")
            task = self._task(self._decode(server, row, request))
            self._tasks.add(task)
            server.running[request.name] = Running(row.row.number, task)
            task.add_done_callback(partial(self._decoded, server, row, request.name))

    async def _decode(self, server: Server, row: Decoded, request: DrawRequest) -> None:
        """Let a server decode a row to its end. If cancelled, the row keeps its earlier tokens."""
        try:
            piece = await self._drawn(server, row, request)
        except NoAnswerError as error:
            self._no_answer(server, error)
        else:
            self._pieces += 1
            row.take(piece, self._number, self._words)

    def _decoded(self, server: Server, row: Decoded, name: str, task: asyncio.Task[None]) -> None:
        """Handle the end of a request. If its row has to continue, it waits again."""
        del server.running[name]
        if not self._closed:
            if row.row.number in self._rows:
                self._go_on(row)
            self._fill()

    async def _drawn(self, server: Server, row: Decoded, request: DrawRequest) -> Piece:
        """Return what a server samples. ModelError if it used other weights than it was given."""
        await self._ensure_weights(server)
        piece = await server.dialect.draw(server.client, server.info.model, request)
        if self._given and piece.tag not in (None, self._tag):
            raise ModelError(
                f"{server.url} has drawn with the weights {piece.tag!r}, and was given {self._tag!r}: another program "
                "gives it weights too. A server must belong to one sampler"
            )
        if not piece.tokens and not row.wanted and not self._held:
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
            asyncio.get_running_loop().call_later(_HELD, self._reply_rows)

    def _reply_rows(self) -> None:
        done, self._done = self._done, []
        self._reply(Rows(done))

    def _leave(self, numbers: set[int], *, wanted: bool) -> None:
        """End rows. With `wanted`, they are returned as they are."""
        waited = [row for row in self._waiting if row.row.number in numbers]
        self._waiting = deque(row for row in self._waiting if row.row.number not in numbers)
        if wanted:
            for number in numbers:
                self._rows[number].wanted = True
            for row in waited:
                self._go_on(row)
            self._tasks.add(self._task(self._interrupt(numbers)))
            return
        for number in numbers:
            del self._rows[number]
        for server in self._servers:
            left = {name: each for name, each in server.running.items() if each.row in numbers}
            for each in left.values():
                each.task.cancel()
            if left:
                self._tasks.add(self._task(self._forget(server, list(left))))

    async def _forget(self, server: Server, names: Sequence[str]) -> None:
        """Abort requests whose connections are closed, because servers may notice that late."""
        with suppress(NoAnswerError):
            await server.dialect.abort(server.client, names)

    async def _interrupt(self, numbers: set[int] | None = None) -> None:
        """End the requests of some or all rows as they are, and wait until they have ended."""
        for pause in accumulate(repeat(_AGAIN), lambda before, _: min(2 * before, _SELDOM)):
            running = {
                server: {name: each for name, each in server.running.items() if numbers is None or each.row in numbers}
                for server in self._servers
            }
            if not any(running.values()):
                return
            await asyncio.gather(*(self._abort(server, each) for server, each in running.items() if each))
            tasks = [each.task for some in running.values() for each in some.values()]
            await asyncio.wait(tasks, timeout=pause)

    async def _abort(self, server: Server, running: Mapping[str, Running]) -> None:
        """End requests. If a server cannot do that, their tokens are lost."""
        try:
            is_aborted = await server.dialect.abort(server.client, list(running))
        except NoAnswerError:
            is_aborted = False
        if not is_aborted:
            for each in running.values():
                each.task.cancel()

    async def _load(self, order: Load) -> None:
        async with self._loading:
            if self._folders is None:
                self._reply(Refused("sampler.http.weights is not set, and so the servers' weights stay as they are"))
                return
            if (refused := await asyncio.to_thread(refusal, self._specs, order)) is not None:
                self._reply(Refused(refused))
                return
            name = f"version-{order.version}-{self._loads}"
            try:
                folder = await asyncio.to_thread(self._folders.of, name, order.buckets)
            except OSError as error:
                self._reply(Refused(f"they cannot be written into sampler.http.weights: {error}"))
                return
            began = time.monotonic()
            values = await self._send_weights(folder, order.version, order.number, order.probe)
            seconds = time.monotonic() - began
            self._reply(Loaded(order.version, self._pieces, seconds, np.array(values, np.float32).tobytes()))
            await asyncio.to_thread(self._folders.keep, folder)

    async def _send_weights(self, folder: str, version: int, number: int, probe: Sequence[list[int]]) -> list[float]:
        """Load weights into the servers, and return their log-probs of a probe.

        A server that does not answer loads them before it samples again. At least one has to answer.
        """
        self._held = True
        await self._interrupt()
        renewals = [each.making_sure for each in self._servers if each.making_sure is not None]
        await asyncio.gather(*renewals, return_exceptions=True)  # earlier weights, for rows that have ended
        self._given, self._version, self._number, self._probe, self._read = folder, version, number, probe, []
        self._loads += 1
        for server in self._servers:
            server.sure = False
        given = False
        while not given and not self._closed:
            given = any(await asyncio.gather(*map(self._try_ensure_weights, self._servers)))
            if not given:
                await asyncio.sleep(max(0.0, min(each.next_try for each in self._servers) - time.monotonic()))
        self._held = False
        self._fill()
        return self._read

    async def _try_ensure_weights(self, server: Server) -> bool:
        """Try to bring a server to the right weights. True if it has them."""
        try:
            await self._ensure_weights(server)
        except NoAnswerError as error:
            self._no_answer(server, error)
            return False
        server.answered()
        return True

    async def _ensure_weights(self, server: Server) -> None:
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
            if server.loads == self._loads:
                log.warning(
                    f"{server.url} has other weights than it was given, as after a restart: weights are sent again"
                )
            await self._update(server)
            read = [dialect.read(client, server.info.model, tokens, f"{self._tag}-probe") for tokens in self._probe]
            values = [value for row in await asyncio.gather(*read) for value in row]
            self._read = self._read or values
            apart = float(np.abs(np.subtract(values, self._read)).mean()) if values else 0.0
            if not apart <= self._tolerance:
                raise ModelError(
                    f"{server.url} makes something else of the weights of version {self._version} than another server "
                    f"did, or itself before: log-probs are {apart:.3g} apart (at most {self._tolerance:g})"
                )
            server.loads = self._loads
        elif not self._given:
            await client.get("/v1/models")
        server.sure = True

    @property
    def _tag(self) -> str:
        return f"{self._session}-{self._loads}-version-{self._version}"

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

    def _no_answer(self, server: Server, error: NoAnswerError) -> None:
        """Try a server again later. Fails the sampler if no server has answered for long."""
        server.missed(error)
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, server.next_try - time.monotonic()), self._fill)
        if all(each.silence > self._options.patience for each in self._servers):
            self._fail(silent(self._servers, self._options.patience))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose errors fail the sampler."""

        async def guarded() -> None:
            try:
                await work
            except MeshrlError as error:
                self._fail(error if isinstance(error, ModelError) else ModelError(str(error)))
            except Exception as error:  # noqa: BLE001 -- any bad answer is reported to all that wait
                self._fail(ModelError(f"a server's answer cannot be read: {described(error)}"))

        task = asyncio.ensure_future(guarded())
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task


def silent(servers: Sequence[Server], patience: float) -> EngineDied:
    """Return the error for servers that have not answered for long."""
    silent = "; ".join(each.state() for each in servers)
    return EngineDied(
        f"no answer from {silent} (sampler.http.patience = {patience:g}): start a server, or name others in "
        "sampler.http.urls, and respawn the sampler"
    )
