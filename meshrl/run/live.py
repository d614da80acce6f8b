"""A running run: it reports what it does each second, and obeys requests between two steps."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from meshrl import log
from meshrl.errors import MeshrlError
from meshrl.events import EventLog, Pending, waiting
from meshrl.mesh import running_calls, slow_calls
from meshrl.observe import CONTROL, LOOKS, NOW, PAUSED, REQUESTS, Command, Runs, RunStatus, Waits, requested_at
from meshrl.run.folder import part_of, write_whole
from meshrl.run.health import resident_bytes

_MOST: Final = 32
"""Waits that are reported at most, and calls."""
_TEXT: Final = 200
"""Characters of a text at most."""


class Watch:
    """Watches from a thread, because the event loop itself may be blocked.

    Logs calls that take long, and writes now.json.
    """

    def __init__(self, after: float, events: EventLog, folder: Callable[[], Path], check: Callable[[], None]) -> None:
        """`after`: seconds before a call is reported. `folder`: the run's. `check` raises if it must not be written."""
        self._after = after
        self._events = events
        self._folder = folder
        self._check = check
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="meshrl-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError, MeshrlError):
            self._check()
            now = self._folder() / NOW
            for file in (now, part_of(now)):  # the part is left if the folder was moved while it was written
                file.unlink(missing_ok=True)

    def _look(self) -> None:
        while True:
            for message in slow_calls(self._after):
                log.warning(message)
            # The run's own writes report a full disk or a moved folder.
            with suppress(OSError, MeshrlError):
                self._check()
                write_whole(self._folder() / NOW, msgspec.json.encode(_now(self._events)))
            if self._stopped.wait(min(LOOKS, self._after)):
                return


def _now(events: EventLog) -> RunStatus:
    at = events.now()
    pending = [each for each in list(Pending.table.values()) if each.to is events][:_MOST]
    calls = sorted(running_calls(), key=lambda call: -call[2])[:_MOST]
    return RunStatus(
        round(at, 1),
        [Waits(each.who, each.what, _blocked_by(each)[:_TEXT], round(at - each.began, 1)) for each in pending],
        [Runs(where, ranks[:_TEXT], round(seconds, 1)) for where, ranks, seconds in calls],
        resident_bytes(),
    )


def _blocked_by(pending: Pending) -> str:
    """What blocks it now, or what blocked it first if concurrent changes make the question fail."""
    with suppress(Exception):
        return pending.on if isinstance(pending.on, str) else pending.on()
    return pending.at_first


_LOOKS: Final = 0.2
"""Seconds between two checks of a paused run."""


class Control:
    """Requests in `control/` of a run's folder. The run waits while `pause` exists.

    It obeys `checkpoint` and `stop` and removes them. A file that cannot be removed is obeyed once, until it is written
    again.
    """

    def __init__(self, run: Callable[[], Path]) -> None:
        """`run` returns the run's folder, which may move. Requests to an earlier part of the run are ignored."""
        self._run = run
        shutil.rmtree(self._folder, ignore_errors=True)
        self._handled = {each: requested_at(self._folder / each) for each in REQUESTS}
        """Modification time of each command that is done or belongs to an earlier part of the run."""

    @property
    def _folder(self) -> Path:
        return self._run() / CONTROL

    async def obey(self, checkpoint: Callable[[], Awaitable[None]] | None) -> None:
        """Carry out requests, and wait while the run is paused. Raises KeyboardInterrupt on `stop`, like Ctrl-C.

        `checkpoint` writes a checkpoint. None if the run keeps none.
        """
        if self._is_requested("pause"):
            log.info(f"paused: remove {self._folder / 'pause'} to resume")
            with waiting("script", PAUSED, f"{self._folder / 'pause'} is there"):
                while self._is_requested("pause") and not self._is_requested("stop"):
                    await self._write_checkpoint(checkpoint)
                    await asyncio.sleep(_LOOKS)
        await self._write_checkpoint(checkpoint)
        if self._is_requested("stop"):
            if checkpoint:
                await checkpoint()
            shutil.rmtree(self._folder, ignore_errors=True)  # the next part of the run ignores what is left
            log.info("stopped on request")
            raise KeyboardInterrupt

    async def _write_checkpoint(self, checkpoint: Callable[[], Awaitable[None]] | None) -> None:
        if not self._is_requested("checkpoint"):
            return
        file = self._folder / "checkpoint"
        self._handled["checkpoint"] = requested_at(file)
        if checkpoint:
            await checkpoint()
        else:
            log.warning("a checkpoint was requested, but the run writes none: run.checkpoint_every is not set")
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(f"{file} was carried out but cannot be removed ({error}): touch it to request it again")

    def _is_requested(self, command: Command) -> bool:
        return requested_at(self._folder / command) not in {0, self._handled.get(command)}
