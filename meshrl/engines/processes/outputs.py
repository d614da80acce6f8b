"""Output of ranks, copied from their pipes to the files of the run and to the engine's own output."""

import os
import selectors
from contextlib import suppress
from typing import Final

from meshrl.engines.hosting import RankLog

_AT_ONCE: Final = 65536
"""Size in bytes of a read, which is the capacity of a pipe."""
_REST: Final = 16
"""Most reads from a rank's pipe after its end, because a process that it started may write forever."""


class Output:
    """The two pipes of a rank. The template reads one end of each."""

    def __init__(self, log: RankLog) -> None:
        """`log`: its folder is closed at the end."""
        self._log = log
        self._reads: dict[int, int] = {}
        """The ends to read, each with the output stream of the rank that it carries."""
        self._writes: dict[int, int] = {}
        for stream in (1, 2):
            read, write = os.pipe()
            self._reads[read], self._writes[write] = stream, stream

    def taken(self) -> None:
        """Redirect the output, in the rank."""
        for end, stream in self._writes.items():
            os.dup2(end, stream)
        self.let_go()

    def begun(self, pid: int, host: str, ready: selectors.BaseSelector) -> None:
        """Start reading, in the template, once the rank has the other ends."""
        self._log.begin(pid, host)
        for end in self._writes:
            os.close(end)
        self._writes.clear()
        for end in self._reads:
            os.set_blocking(end, False)
            ready.register(end, selectors.EVENT_READ, self)

    def pass_on(self, end: int, ready: selectors.BaseSelector) -> bool:
        """Pass on what was written. False if there was nothing."""
        if end not in self._reads:  # the rank was just buried
            return False
        try:
            text = os.read(end, _AT_ONCE)
        except BlockingIOError:
            return False
        if not text:  # no writer is left
            ready.unregister(end)
            os.close(end)
            del self._reads[end]
            return False
        self._log.append(text)
        with suppress(OSError):  # if no reader is left
            while text:
                text = text[os.write(self._reads[end], text) :]
        return True

    def finish(self, ready: selectors.BaseSelector) -> None:
        """Pass on the rest after the rank has ended."""
        for end in list(self._reads):
            for _ in range(_REST):
                if not self.pass_on(end, ready):
                    break
        for end in self._reads:
            ready.unregister(end)
        self.let_go()

    def let_go(self) -> None:
        """Close the ends that are open here."""
        for end in (*self._reads, *self._writes, self._log.folder):
            os.close(end)
        self._reads.clear()
        self._writes.clear()
