"""The bytes of a value as they arrive, piece by piece, for threads that wait for them."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from meshrl.mesh import Bytes

PIECE: Final = 1 << 20
"""Bytes of a piece. A machine forwards one piece while the next arrives."""


class Flow:
    """The bytes of a value, which are here or arrive."""

    def __init__(self, head: bytes, buffers: Sequence[Bytes], *, here: bool) -> None:
        """`head`: the pickle of the value without its buffers. `here`: True if the buffers are filled."""
        self.head: Final = head
        self.sizes: Final = [buffer.nbytes for buffer in buffers]
        """Bytes of each buffer."""
        self.pieces: Final = [each[start : start + PIECE] for each in buffers for start in range(0, len(each), PIECE)]
        self.whole: Final[Future[None]] = Future()
        """Done when all bytes are here. Has the error if they never come."""
        self._here = 0
        self._changed = threading.Condition()
        if here:
            self.came(len(self.pieces))

    def came(self, number: int) -> None:
        """Note that this many pieces are here."""
        with self._changed:
            self._here = number
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """Note that all bytes are here, or the failure."""
        with self._changed:
            if error is None:
                self.whole.set_result(None)
            else:
                self.whole.set_exception(error)
            self._changed.notify_all()

    def piece(self, number: int) -> Bytes:
        """Wait for a piece and return it. Raises the flow's failure."""
        with self._changed:
            self._changed.wait_for(lambda: number < self._here or self.whole.done())
        if number >= self._here:
            self.whole.result()
        return self.pieces[number]
