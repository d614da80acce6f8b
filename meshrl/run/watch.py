"""A run's look at its own calls: which of them have been running for long."""

import threading
from typing import Final

from meshrl import log
from meshrl.mesh import slow_calls

_LOOKS: Final = 1.0
"""Seconds between two looks, at most."""


class Watch:
    """Says in the log what has not answered for long, from a thread: the loop itself may be what is blocked."""

    def __init__(self, after: float) -> None:
        """`after`: seconds before a call is told of."""
        self._after = after
        self._stopped = threading.Event()
        threading.Thread(target=self._look, name="meshrl-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _look(self) -> None:
        while not self._stopped.wait(min(_LOOKS, self._after)):
            for told in slow_calls(self._after):
                log.warning(told)
