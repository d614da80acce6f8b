"""The progress line of a run."""

import time
from collections.abc import Mapping
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from meshrl import log

_PLAIN_SECONDS: Final = 5.0
_SHOWN: Final = ("reward", "loss", "kl", "clip_fraction", "entropy", "truncated", "reward_errors", "step_s")
"""Numbers that the line shows if a step has them."""


class Progress:
    """A live line on a terminal. Elsewhere, log lines for the first step, the last, and some between."""

    def __init__(self, count: int, done: int = 0) -> None:
        """`count`: number of steps. `done`: those that an earlier part of the run has made."""
        self._count = count
        self._earlier = done
        self._done = done
        self._began = time.perf_counter()
        self._shown_at = -_PLAIN_SECONDS
        self._live: Bar | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
            self._live = Bar(*columns, TimeRemainingColumn(), console=console, refresh_per_second=4)
            self._task: TaskID = self._live.add_task("", total=count, completed=done)
            self._live.start()

    def show(self, numbers: Mapping[str, float], beside: Mapping[str, float]) -> None:
        """Count one more step, and show those of its numbers that are always shown, and all `beside`."""
        self._done += 1
        shown = {name: f"{numbers[name]:.4g}" for name in _SHOWN if name in numbers}
        shown |= {name.replace(" ", "_"): f"{value:.3g}" for name, value in beside.items()}
        if self._live:
            text = " ".join(f"{name}={value}" for name, value in shown.items())
            self._live.update(self._task, advance=1, description=text)
            return
        seconds = time.perf_counter() - self._began
        if seconds - self._shown_at >= _PLAIN_SECONDS or self._done == self._count:
            self._shown_at = seconds
            left = seconds / (self._done - self._earlier) * (self._count - self._done)
            log.info(f"step {self._done}/{self._count}", **shown, left=f"{left:.0f}s")

    def close(self) -> None:
        """End the line."""
        if self._live:
            self._live.stop()
