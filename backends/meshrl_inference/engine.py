"""The interface of an engine: a backend writes a module with a function `start` that makes an `Engine`."""

from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, NamedTuple, Protocol

from meshrl_inference.messages import Done, Generate, Load

WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"
"""Engines' names for the two parts of a GPU's memory."""
PROBES: Final = 8
"""Most sequences of a probe."""


class Outcome(NamedTuple):
    """How one of an engine's processes has read a broadcast of weights."""

    way: str = ""
    """How it came, such as "by gloo". Empty if not all weights arrived as they were sent."""
    begun: bool = False
    """True if some of the model's tensors are new."""
    reason: str = ""
    lost: str = ""
    """Who has not sent weights that did not arrive."""


class Unread(Exception):
    """A broadcast that did not reach all of an engine's processes as it was sent."""

    def __init__(self, outcome: Outcome, *, begun: bool) -> None:
        super().__init__(outcome, begun)
        self.outcome = outcome
        """Of the first process that it did not reach."""
        self.begun = begun
        """True if some tensors of any process are new."""


def way_of(outcomes: Iterable[Outcome]) -> str:
    """Return how a broadcast came to an engine's processes. Raises Unread if it did not reach all."""
    there = list(outcomes)
    if failed := [each for each in there if not each.way]:
        raise Unread(failed[0], begun=any(each.begun for each in there))
    return there[0].way


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

    def take(self, order: Load) -> str:
        """Use new weights from the next step on. Names, dtypes and shapes were checked before, and bytes in buckets.

        Returns how a broadcast came, else an empty string. Raises Unread if a broadcast failed. The
        engine then decodes nothing until other weights come if some tensors are new.
        """
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
