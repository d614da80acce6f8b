"""The way to a rank's process: each engine, or each pair of processes, has its own."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
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


class Channel(ABC):
    """Carries calls to one process. What was sent in an order arrives in it, or is ordered there by its number.

    What is awaited raises `Gone` when the process is no more, `Broken` for what did not get through.
    """

    open = 0
    """How many calls have no answer."""
    cancelled = False
    """Whether one was cancelled, so that the process may have seen calls of later numbers."""

    @abstractmethod
    def call(self, ask: Ask, given: Arguments | None, *, stream: bool) -> Awaitable[object]:
        """Send a call, or open a stream; the answer. TypeError or PicklingError for what cannot be sent."""

    @abstractmethod
    def request(self, service: Service, *arguments: object) -> Awaitable[object]:
        """Ask for something else; the answer."""

    @abstractmethod
    def tell(self, service: Service, *arguments: object) -> None:
        """The same, where nobody waits for the answer."""
