"""The channel to a rank's process. Each engine, or pair of processes, has its own kind."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Literal, TypeAlias

from meshrl.engines.hosting.messages import Arguments, Ask

Service: TypeAlias = Literal["place", "clock", "construct", "next", "cancel", "stop", "leave"]
"""What a process does besides calls: the methods of `Host`."""


class Gone(Exception):
    """The process has ended; the message says how."""


class Broken(Exception):
    """A call went wrong on its way: what was sent could not be unpickled, or the like."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.traceback = traceback


class Reply:
    """What comes back from a process. Who listens is told as it arrives, who awaits it one turn of the loop later."""

    __slots__ = ("_told", "error", "is_here", "value")

    def __init__(self) -> None:
        self.is_here: bool = False
        self.value: object = None
        self.error: Exception | None = None
        """`Gone` or `Broken`, where it has no value."""
        self._told: list[Callable[[], object]] = []

    def arrive(self, value: object, error: Exception | None = None) -> None:
        """It is here; what comes later, from a host that was given up, is not."""
        if self.is_here:
            return
        self.is_here, self.value, self.error = True, value, error
        told, self._told = self._told, []
        for each in told:
            each()

    def tell(self, told: Callable[[], object]) -> None:
        """Call this when it is here, or now. It must not raise."""
        if self.is_here:
            told()
        else:
            self._told.append(told)

    async def here(self) -> None:
        """Wait until it is here."""
        if not self.is_here:
            arrived = asyncio.Event()
            self._told.append(arrived.set)
            await arrived.wait()

    def __await__(self) -> Generator[object, None, object]:
        yield from self.here().__await__()
        if self.error is not None:
            raise self.error
        return self.value


class Channel(ABC):
    """Carries calls to one process. What was sent in an order arrives in it, or is ordered there by its number.

    What is awaited raises `Gone` when the process is no more, `Broken` for what did not get through.
    """

    @abstractmethod
    def call(self, ask: Ask, given: Arguments | None, *, stream: bool) -> Reply:
        """Send a call, or open a stream; the answer. TypeError or PicklingError for what cannot be sent."""

    @abstractmethod
    def request(self, service: Service, *arguments: object) -> Reply:
        """Ask for something else; the answer."""

    @abstractmethod
    def tell(self, service: Service, *arguments: object) -> None:
        """The same, where nobody waits for the answer."""
