"""SIGTERM ends a command in the same way as Ctrl-C."""

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
    """Make SIGTERM cancel the task that runs the block, as Ctrl-C does. A second SIGTERM ends the process at once.

    Raises `Terminated` if SIGTERM ended the block.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or current_thread() is not main_thread():
        yield  # keep an installed handler
        return
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
    came = False

    def cancel(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        loop.call_soon_threadsafe(task.cancel)  # this wakes the loop

    # Not loop.add_signal_handler, after which the loop would wait on files: see RankLoop.
    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if came:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
