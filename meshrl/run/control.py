"""What somebody asks of a run that goes on: files in its folder, for which it looks between two steps."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal, TypeAlias

from meshrl import log
from meshrl.events import waiting

Command: TypeAlias = Literal["pause", "resume", "checkpoint", "stop"]

PAUSED: Final = "the end of a pause"
"""What a script waits for that is paused."""
_FOLDER: Final = "control"
_LOOKS: Final = 0.2
"""Seconds between two looks of a run that is paused."""


def ask(run: Path, command: Command) -> None:
    """Ask something of a run, by its folder: it does it before its next step. OSError where it cannot be written."""
    folder = run / _FOLDER
    folder.mkdir(exist_ok=True)
    if command == "resume":
        (folder / "pause").unlink(missing_ok=True)
    else:
        (folder / command).touch()


def asked(run: Path) -> list[str]:
    """What is asked of a run, and not done."""
    return [each for each in ("pause", "checkpoint", "stop") if (run / _FOLDER / each).is_file()]


class Control:
    """`control/` of a run's folder: it waits while `pause` is there; `checkpoint` and `stop` it obeys and removes."""

    def __init__(self, run: Callable[[], Path]) -> None:
        """`run`: its folder, wherever that is. What was asked of an earlier part of the run is forgotten."""
        self._run = run
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self._run() / _FOLDER

    async def obey(self, checkpoint: Callable[[], Awaitable[None]] | None) -> None:
        """Do what is asked, and wait while it is paused. KeyboardInterrupt where it is to stop, as by Ctrl-C.

        `checkpoint`: writes one; None for a run that keeps none.
        """
        if not self._folder.is_dir():
            return
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
            shutil.rmtree(self._folder)
            log.info("stopped, as was asked")
            raise KeyboardInterrupt

    async def _keep(self, checkpoint: Callable[[], Awaitable[None]] | None) -> None:
        if not self._is_asked("checkpoint"):
            return
        if checkpoint:
            await checkpoint()
        else:
            log.warning("a checkpoint was asked for, and the run keeps none: run.checkpoint_every is not set")
        (self._folder / "checkpoint").unlink(missing_ok=True)

    def _is_asked(self, command: Command) -> bool:
        return (self._folder / command).is_file()
