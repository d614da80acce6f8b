"""SIGTERM, which ends a command as Ctrl-C does."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import cast


class Terminated(Exception):
    """SIGTERM ended the run."""


@contextmanager
def cancelled_by_sigterm() -> Generator[None]:
    """SIGTERM cancels the task that the block is in, as Ctrl-C does, and a second one ends the process at once.

    Raises `Terminated` when the block has ended by that.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or current_thread() is not main_thread():
        yield  # whoever has a handler wants it
        return
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
    came = False

    def cancel(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        loop.call_soon_threadsafe(task.cancel)  # which wakes the loop

    # Not the loop's own handler, with which it would wait on files from here on: see RankLoop.
    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if came:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
