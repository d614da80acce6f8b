"""An asyncio loop whose idle wait is a lock: other threads wake it with less delay than through a socket."""

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class _Mailbox(selectors.DefaultSelector):
    """Waits on a lock while nothing but the loop's own wake-up socket is registered, else on the files."""

    def __init__(self) -> None:
        super().__init__()
        self._bell = threading.Lock()
        self._bell.acquire()
        self.has_signals = False

    @property
    def has_files(self) -> bool:
        """Whether something else than another thread can wake the loop. Nothing wakes one that is closed."""
        return self.has_signals or len(self.get_map() or ()) > 1

    def ring(self) -> None:
        """End the wait, now or the next one. Ringing twice is ringing once."""
        with contextlib.suppress(RuntimeError):
            self._bell.release()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait; the files that are ready, none where only the bell rang."""
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
    """The event loop of a rank, and a good one for the controller: `asyncio.Runner(loop_factory=RankLoop)`."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        super().__init__(self._mailbox)

    def _write_to_self(self) -> None:
        # asyncio's hook: a callback came from another thread. The loop registers a file before it looks for
        # callbacks again, so whoever sees no file here can rely on the bell.
        self._mailbox.ring()
        if self._mailbox.has_files:
            super()._write_to_self()  # type: ignore[misc]  # private, so not in the type stubs

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """As in asyncio; signals wake through the socket, so from here on the loop waits on files."""
        self._mailbox.has_signals = True
        super().add_signal_handler(sig, callback, *args)
