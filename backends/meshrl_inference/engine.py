"""The interface of an engine: a backend writes a module with a function `start` that makes an `Engine`."""

from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, Protocol

from meshrl_inference.messages import Done, Generate, Load

WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"
"""Engines' names for the two parts of a GPU's memory."""
PROBES: Final = 8
"""Most sequences of a probe."""


class Engine(Protocol):
    """An engine, and the rows that it decodes. The process's main thread calls everything."""

    version: str
    """The version of the engine's package."""
    tokens: int
    """Number of tokens that the model knows."""
    steps: int
    """Number of decode steps."""
    left: list[Done]
    """Rows that were decoded, or stopped and are to be returned. `worker` removes them."""

    @property
    def processes(self) -> list[BaseProcess]:
        """Its processes, one for each place along tp. Empty if it computes in this one."""
        ...

    @property
    def decodes(self) -> bool:
        """True if there are rows to decode."""
        ...

    def add(self, order: Generate, salt: str) -> None:
        """Start to decode rows. They share cached prefixes only with rows of the same salt."""
        ...

    def leave(self, rows: list[int], *, told: bool) -> None:
        """Stop decoding these rows. With `told`, they come back in `left`, now or in a step, aborted."""
        ...

    def step(self, orders: Connection) -> None:
        """Decode until a row has ended, but only briefly, and no longer than until there is an order to read."""
        ...

    def take(self, order: Load) -> None:
        """Use new weights from the next step on. Their tensors were checked before."""
        ...

    def read(self, probe: list[list[int]], salt: str) -> list[float]:
        """Return the log-probs of tokens except the first of each sequence. Other rows are decoded in between."""
        ...

    def sleep(self) -> None:
        """Free the GPU's memory, because there is nothing to decode."""
        ...

    def wake(self, names: list[str]) -> None:
        """Take GPU memory again for `WEIGHTS`, `CACHE` or both, whichever sleep."""
        ...
