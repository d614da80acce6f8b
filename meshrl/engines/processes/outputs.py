"""Output of ranks, copied from their pipes to the files of the run and to the engine's own output."""

import os
import selectors
from contextlib import suppress
from typing import Final

from meshrl.engines.hosting import RankLog

_AT_ONCE: Final = 65536
"""Bytes, which are as many as a pipe holds."""
_REST: Final = 16
"""Pipes full that are read of a rank that has ended: something that it started may write for ever."""


class Output:
    """The two pipes of a rank, of which the template reads one end."""

    def __init__(self, log: RankLog) -> None:
        """`log`: its folder is closed in the end."""
        self._log = log
        self._reads: dict[int, int] = {}
        """The ends that are read, each with the stream of the rank that goes there."""
        self._writes: dict[int, int] = {}
        for stream in (1, 2):
            read, write = os.pipe()
            self._reads[read], self._writes[write] = stream, stream

    def taken(self) -> None:
        """In the rank: what it writes goes there from now on."""
        for end, stream in self._writes.items():
            os.dup2(end, stream)
        self.let_go()

    def begun(self, pid: int, host: str, ready: selectors.BaseSelector) -> None:
        """In the template: the rank has the other ends."""
        self._log.begin(pid, host)
        for end in self._writes:
            os.close(end)
        self._writes.clear()
        for end in self._reads:
            os.set_blocking(end, False)
            ready.register(end, selectors.EVENT_READ, self)

    def pass_on(self, end: int, ready: selectors.BaseSelector) -> bool:
        """Hand on what is there; False where there was nothing."""
        if end not in self._reads:  # the rank was buried this moment
            return False
        try:
            text = os.read(end, _AT_ONCE)
        except BlockingIOError:
            return False
        if not text:  # nobody writes there any more
            ready.unregister(end)
            os.close(end)
            del self._reads[end]
            return False
        self._log.append(text)
        with suppress(OSError):  # where nobody reads it any more
            while text:
                text = text[os.write(self._reads[end], text) :]
        return True

    def finish(self, ready: selectors.BaseSelector) -> None:
        """The rank has ended: hand on what is left."""
        for end in list(self._reads):
            for _ in range(_REST):
                if not self.pass_on(end, ready):
                    break
        for end in self._reads:
            ready.unregister(end)
        self.let_go()

    def let_go(self) -> None:
        """Close what is open here."""
        for end in (*self._reads, *self._writes, self._log.folder):
            os.close(end)
        self._reads.clear()
        self._writes.clear()
