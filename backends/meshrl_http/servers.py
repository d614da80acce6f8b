"""A rank's servers as a sampler sees them: runs a `pool` in a new thread."""

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from transformers import AutoConfig, PreTrainedTokenizerBase

from meshrl import log
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import Sampling
from meshrl_http.client import Client, NoAnswerError
from meshrl_http.folders import Folders
from meshrl_http.found import find, no_weights
from meshrl_http.options import HttpConfig
from meshrl_http.pool import Model, Pool, silent
from meshrl_http.server import Server
from meshrl_inference.engine_side.loading import Naming
from meshrl_inference.engine_side.protocol import Answer, Order
from meshrl_inference.process import EngineConnection
from meshrl_torch.weights.transfer import TOLERANCE

T = TypeVar("T")

_BESIDE: Final = 16
"""Connections to a server in addition to those of its rows."""
_GRACE: Final = 5.0
"""Seconds for closing connections."""


class Servers(EngineConnection):
    """External servers as an engine."""

    def __init__(
        self,
        options: HttpConfig,
        urls: Sequence[str],
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str,
        slots: int,
    ) -> None:
        """EngineDied if a server does not answer, ModelError or ConfigError if it cannot be used."""
        super().__init__()
        self.tokens = int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
        self._options = options
        naming, session = Naming(str(folder)), f"meshrl-{secrets.token_hex(6)}"
        key = options.key()
        self._folders = Folders(options.weights, session, folder, naming) if options.weights else None
        self._pool: Pool | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshrl-http", daemon=True)
        self._thread.start()

        async def begun() -> Pool:
            servers = [Server(Client(url, key, slots + _BESIDE), slots) for url in urls]
            model = Model(tokenizer, naming.specs(dtype), TOLERANCE[dtype])
            self._pool = Pool(servers, self._folders, session, model, options.patience, self._tell, self._ended)
            await asyncio.gather(*map(self._know, servers))
            await self._pool.begin()
            if self._end is not None:
                raise self._end
            return self._pool

        try:
            self._found = [each.found for each in self._run(begun()).servers]
        except BaseException:
            self.close()
            raise
        self._urls = urls

    @property
    def max_tokens(self) -> int:
        """The longest sequence that all of them accept."""
        return min((each.longest for each in self._found if each.longest), default=1 << 62)

    def check(self, sampling: Sampling) -> None:
        """Raise DataError if a server cannot sample this way."""
        for url, found in zip(self._urls, self._found, strict=True):
            found.check(url, sampling)

    def send(self, order: Order) -> None:
        """Send an order. Raises the error that ended the servers' use."""
        if self._end is not None or self._pool is None:
            raise self._end or ModelError("the servers were not asked yet")
        self._loop.call_soon_threadsafe(self._pool.take, order)

    def fail(self, error: ModelError) -> None:
        """End the use of the servers with this error."""
        self._end = self._end or error
        if self._pool is not None:
            self._loop.call_soon_threadsafe(self._pool.drop)

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
        try:
            if self._pool is not None:
                await self._pool.close()
        finally:
            self._loop.stop()

    async def _know(self, server: Server) -> None:
        """Query a server."""
        patience = self._options.patience
        try:
            server.found = await server.insist(lambda: find(server.client, self._options.model), patience)
        except NoAnswerError:
            raise silent([server], patience) from None
        log.info(f"{server.url}: {server.found}")
        if self._folders and not server.found.takes_weights:
            raise ConfigError(no_weights(server.url))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _tell(self, answer: Answer) -> None:
        self._call_soon(partial(self._on_answer, answer))

    def _ended(self, error: ModelError) -> None:
        self._end = self._end or error
        self._call_soon(partial(self._on_end, self._end))
