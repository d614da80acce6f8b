"""Control of a running run: files in its folder that it looks for between two steps."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from meshrl import log
from meshrl.events import waiting
from meshrl.observe import CONTROL, PAUSED, REQUESTS, Command, requested_at

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
        self._done = {each: requested_at(self._folder / each) for each in REQUESTS}
        """Modification time of each command that is done or belongs to an earlier part of the run."""

    @property
    def _folder(self) -> Path:
        return self._run() / CONTROL

    async def obey(self, checkpoint: Callable[[], Awaitable[None]] | None) -> None:
        """Carry out requests, and wait while the run is paused. Raises KeyboardInterrupt on `stop`, like Ctrl-C.

        `checkpoint` writes a checkpoint. None if the run keeps none.
        """
        if self._is_asked("pause"):
            log.info(f"paused: remove {self._folder / 'pause'} to resume")
            with waiting("script", PAUSED, f"{self._folder / 'pause'} is there"):
                while self._is_asked("pause") and not self._is_asked("stop"):
                    await self._keep(checkpoint)
                    await asyncio.sleep(_LOOKS)
        await self._keep(checkpoint)
        if self._is_asked("stop"):
            if checkpoint:
                await checkpoint()
            shutil.rmtree(self._folder, ignore_errors=True)  # the next part of the run ignores what is left
            log.info("stopped on request")
            raise KeyboardInterrupt

    async def _keep(self, checkpoint: Callable[[], Awaitable[None]] | None) -> None:
        if not self._is_asked("checkpoint"):
            return
        file = self._folder / "checkpoint"
        self._done["checkpoint"] = requested_at(file)
        if checkpoint:
            await checkpoint()
        else:
            log.warning("a checkpoint was requested, but the run writes none: run.checkpoint_every is not set")
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(f"{file} was carried out but cannot be removed ({error}): touch it to request it again")

    def _is_asked(self, command: Command) -> bool:
        return requested_at(self._folder / command) not in {0, self._done.get(command)}
