"""The bytes of a value as they arrive, piece by piece, for threads that wait for them."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from meshrl.mesh import Bytes

PIECE: Final = 1 << 20
"""Bytes of a piece: a machine hands on what it has while the next piece comes."""


class Flow:
    """All of them here, or some on their way."""

    def __init__(self, head: bytes, buffers: Sequence[Bytes], *, here: bool) -> None:
        """`head`: what the value is unpickled from, with the buffers; `here`: whether these are filled."""
        self.head: Final = head
        self.sizes: Final = [buffer.nbytes for buffer in buffers]
        """Bytes of each buffer."""
        self.pieces: Final = [each[start : start + PIECE] for each in buffers for start in range(0, len(each), PIECE)]
        self.whole: Final[Future[None]] = Future()
        """Done when all is here; has the error where it never comes."""
        self._here = 0
        self._changed = threading.Condition()
        if here:
            self.came(len(self.pieces))

    def came(self, number: int) -> None:
        """So many pieces are here."""
        with self._changed:
            self._here = number
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """It is whole, or has failed."""
        with self._changed:
            if error is None:
                self.whole.set_result(None)
            else:
                self.whole.set_exception(error)
            self._changed.notify_all()

    def piece(self, number: int) -> Bytes:
        """One of them, when it is here. Raises what the flow has failed with."""
        with self._changed:
            self._changed.wait_for(lambda: number < self._here or self.whole.done())
        if number >= self._here:
            self.whole.result()
        return self.pieces[number]
