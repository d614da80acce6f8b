"""The event loop of a rank, which other threads wake fast."""

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")


class _Mailbox(selectors.DefaultSelector):
    """Waits on a lock if only the loop's own wake-up socket is registered, else on the files."""

    def __init__(self) -> None:
        super().__init__()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._has_signals = False
        self.has_files = False
        """True if something other than a thread can wake the loop."""

    def hear_signals(self) -> None:
        """Wait on files from now on, because signals come through the loop's socket."""
        self._has_signals = self.has_files = True

    def register(self, fileobj: "FileDescriptorLike", events: int, data: object = None) -> selectors.SelectorKey:
        """Register a file, as in any selector. The first one is the loop's own."""
        key = super().register(fileobj, events, data)
        self.has_files = self._has_signals or len(self.get_map()) > 1
        return key

    def unregister(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        """Remove a file, as in any selector."""
        key = super().unregister(fileobj)
        self.has_files = self._has_signals or len(self.get_map()) > 1
        return key

    def ring(self) -> None:
        """End this wait or the next one. Ringing twice has no further effect."""
        with contextlib.suppress(RuntimeError):
            self._bell.release()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, and return the files that are ready. None are ready if only the bell rang."""
        if self.has_files:
            return super().select(timeout)
        if timeout is None:
            self._bell.acquire()
        elif timeout > 0:
            self._bell.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
        else:
            self._bell.acquire(blocking=False)
        return []


class RankLoop(asyncio.SelectorEventLoop):
    """The event loop of a rank. It suits the controller too: `asyncio.Runner(loop_factory=RankLoop)`."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        super().__init__(self._mailbox)

    def _write_to_self(self) -> None:
        # asyncio calls this when a callback came from another thread. The loop registers a file before it checks
        # callbacks again, so a caller that sees no file can rely on the bell.
        self._mailbox.ring()
        if self._mailbox.has_files:
            super()._write_to_self()  # type: ignore[misc]  # private, so not in the type stubs

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Add a handler, as in asyncio. Signals wake through the socket, so the loop waits on files from then on."""
        self._mailbox.hear_signals()
        super().add_signal_handler(sig, callback, *args)
