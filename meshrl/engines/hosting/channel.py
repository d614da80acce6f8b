"""The channel to a rank's process. Each engine, or pair of processes, has its own kind."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Literal, TypeAlias

from meshrl.engines.hosting.messages import Arguments, Ask

Service: TypeAlias = Literal["place", "clock", "construct", "next", "cancel", "stop", "leave"]
"""The services of a process besides calls, which are methods of `Host`."""


class Gone(Exception):
    """The process has ended. The message says how."""


class Broken(Exception):
    """A call was lost on its way: for example, its arguments could not be unpickled."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.traceback = traceback


class Reply:
    """The answer of a process. Callbacks run as it arrives. Awaiting tasks continue one turn of the loop later."""

    __slots__ = ("_told", "error", "is_here", "value")

    def __init__(self) -> None:
        self.is_here: bool = False
        self.value: object = None
        self.error: Exception | None = None
        """`Gone` or `Broken`, if there is no value."""
        self._told: list[Callable[[], object]] = []

    def arrive(self, value: object, error: Exception | None = None) -> None:
        """Set the answer. A later one is ignored, such as one from a host that was given up."""
        if self.is_here:
            return
        self.is_here, self.value, self.error = True, value, error
        told, self._told = self._told, []
        for each in told:
            each()

    def tell(self, told: Callable[[], object]) -> None:
        """Call `told` when the answer is here, or now. It must not raise."""
        if self.is_here:
            told()
        else:
            self._told.append(told)

    async def here(self) -> None:
        """Wait until the answer is here."""
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
    """Carries calls to one process. They arrive in the order of sending, or the process orders them by their numbers.

    Awaiting a reply raises `Gone` if the process has ended, and `Broken` if the message was lost.
    """

    @abstractmethod
    def call(self, ask: Ask, given: Arguments | None, *, stream: bool) -> Reply:
        """Send a call or open a stream, and return its reply. TypeError or PicklingError for unsendable values."""

    @abstractmethod
    def request(self, service: Service, *arguments: object) -> Reply:
        """Send another request, and return its reply."""

    @abstractmethod
    def tell(self, service: Service, *arguments: object) -> None:
        """Send a request that needs no answer."""
