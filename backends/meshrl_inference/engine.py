"""What a backend writes of its engine: a module whose function `start` makes an `Engine`."""

from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, Protocol

from meshrl_inference.messages import Done, Generate, Load

WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"
"""What engines call the two that hold a GPU's memory."""
PROBES: Final = 8
"""The most sequences of a probe."""


class Engine(Protocol):
    """An engine, and the rows that it decodes. Everything is called by the process's main thread."""

    version: str
    """Of the engine's package."""
    tokens: int
    """How many different ones the model knows."""
    steps: int
    """How many were made."""
    left: list[Done]
    """Rows that were decoded, or were left and are to be told; `worker` takes them away."""

    @property
    def processes(self) -> list[BaseProcess]:
        """Its own, one for each place along tp; none where it computes in this one."""
        ...

    @property
    def decodes(self) -> bool:
        """Whether there is a row to decode."""
        ...

    def add(self, order: Generate, salt: str) -> None:
        """Begin to decode rows, which share what was read of a prompt with those of the same salt alone."""
        ...

    def leave(self, rows: list[int], *, told: bool) -> None:
        """Stop decoding these rows. Those that are told come back in `left`, now or in a step, aborted."""
        ...

    def step(self, orders: Connection) -> None:
        """Decode on until a row has ended; not for long, and no longer than until there is an order to read."""
        ...

    def take(self, order: Load) -> None:
        """Use new weights, of which each tensor was found to be the one that was sent, from the next step on."""
        ...

    def read(self, probe: list[list[int]], salt: str) -> list[float]:
        """The log-probs of tokens but the first of each sequence. Other rows are decoded on meanwhile."""
        ...

    def sleep(self) -> None:
        """Keep nothing in a GPU's memory: there is nothing to decode."""
        ...

    def wake(self, names: list[str]) -> None:
        """Take the GPU's memory again for `WEIGHTS`, `CACHE` or both, whichever sleep."""
        ...
