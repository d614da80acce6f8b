"""The checkpoints of a run: folders that are whole or not there, and what a run that goes on finds in the newest."""

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, DataError
from meshrl.roles import Stateful
from meshrl.tasks import CursorState

_WHOLE: Final = re.compile(r"step-(\d{6,})")
_RUN: Final = "run.json"
_FOLDER: Final = "checkpoints"


class Saved(msgspec.Struct, frozen=True):
    """What the run itself has to know to go on, between two steps."""

    loop: int
    """Which of the script's calls of `run.steps`."""
    step: int
    """The step of that loop which comes next."""
    done: int
    """Steps of all loops so far."""
    files: Mapping[str, int]
    """Bytes of the run's files that are appended to."""
    once: Mapping[str, Mapping[str, float | str]]
    """What `run.once` measured; what is not finite as text."""
    data: CursorState


class Checkpoints:
    """Those of one run, in `checkpoints/` of its folder: `step-000050` holds what was after 50 steps.

    run.json    a `Saved`
    0-policy    what the first actor wrote that has a state: a folder for each, in the order of spawning
    """

    def __init__(self, run: Path, kept: int, resume: bool) -> None:
        """`kept`: how many stay. With `resume` the run goes on from the newest, if there is one."""
        self._folder = run.resolve() / _FOLDER
        self._kept = kept
        self._actors: dict[str, Stateful] = {}
        self._places = 0
        self._from: Path | None = None
        self._writing: asyncio.Task[None] | None = None
        if resume:
            self._clean_up()
            self._from = newest_checkpoint(run)
        self.saved = _read(self._from / _RUN) if self._from else None
        """Where the run goes on from; None where it begins anew."""

    def place(self, role: str) -> str:
        """The folder of an actor that is about to be spawned."""
        self._places += 1
        return f"{self._places - 1}-{role.lower()}"

    async def adopt(self, place: str, actor: Stateful) -> None:
        """Keep the state of a fresh actor from here on; where the run goes on, restore it first."""
        if self._from:
            if not (self._from / place).is_dir():
                raise ConfigError(
                    f"the script spawns {place}, which {self._from} lacks: it has {', '.join(self._saved_places())}. "
                    "Go on with the script and the roles that it was written with, or start a run of another name"
                )
            await actor.restore(str(self._from / place))
        self._actors[place] = actor

    def check(self) -> None:
        """ConfigError where the checkpoint has an actor that was not spawned before the loop begins."""
        if lacking := [place for place in self._saved_places() if place not in self._actors]:
            raise ConfigError(
                f"{self._from} has {', '.join(lacking)}, which the script has not spawned before its loop: its state "
                "would be lost. Go on with the script and the roles that it was written with"
            )

    async def write(self, saved: Saved, *, wait: bool) -> None:
        """Write a checkpoint, and remove the oldest. If that fails or is cancelled, the others are as they were.

        Without `wait` it returns when the actors have copied their states; `settle` tells how it ended.
        """
        await self.settle()
        name = f"step-{saved.done:06}"
        part = self._folder / f".{name}-{secrets.token_hex(4)}"
        part.mkdir(parents=True)
        try:
            begun = [actor.checkpoint(str(part / place), wait=False) for place, actor in self._actors.items()]
            await _all(begun)
        except BaseException:
            await self._drop(part)
            raise
        self._writing = asyncio.create_task(self._finish(part, name, saved))
        if wait:
            await self.settle()

    async def settle(self, *, wait: bool = True) -> None:
        """Raise where the last checkpoint could not be written. With `wait` it is written after this."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        try:
            await writing
        except asyncio.CancelledError:  # of whoever waits here
            writing.cancel()
            await asyncio.wait([writing])
            raise

    async def close(self, error: BaseException | None) -> None:
        """End what is being written: whole where the run failed, not at all where it was interrupted."""
        if self._writing is None:
            return
        if error is not None and not isinstance(error, Exception):
            self._writing.cancel()
        await asyncio.wait([self._writing])
        if self._writing.cancelled():
            self._remove_parts()  # it may not have begun
        if not self._writing.cancelled() and (failure := self._writing.exception()):
            log.warning(f"the last checkpoint could not be written: {type(failure).__name__}: {failure}")

    async def _finish(self, part: Path, name: str, saved: Saved) -> None:
        try:
            await _all([actor.written() for actor in self._actors.values()])
            (part / _RUN).write_bytes(msgspec.json.encode(saved))
            await asyncio.to_thread(_sync, part)
            _announce(part, self._folder / name)
        except BaseException:
            await self._drop(part)
            raise
        await asyncio.to_thread(_sync_one, self._folder)
        await asyncio.to_thread(self._clean_up)

    async def _drop(self, part: Path) -> None:
        """Remove what is half-written, when nobody writes there any more."""
        await asyncio.gather(*(actor.written() for actor in self._actors.values()), return_exceptions=True)
        shutil.rmtree(part, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove what is too old, or was left half-written or half-removed."""
        for old in _whole(self._folder)[: -self._kept]:
            old.rename(old.with_name(f".{old.name}-gone"))  # so that one that is half removed is not taken for whole
        self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._folder.glob(".step-*"):
            shutil.rmtree(part)

    def _saved_places(self) -> list[str]:
        return sorted(each.name for each in self._from.iterdir() if each.is_dir()) if self._from else []


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of a run's newest checkpoint; None where it has none."""
    return next(reversed(_whole(run.resolve() / _FOLDER)), None)


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait for the end of all, then raise what the first raised: none goes on after that."""
    for failed in await asyncio.gather(*works, return_exceptions=True):
        if failed is not None:
            raise failed


def _whole(folder: Path) -> list[Path]:
    """The checkpoints, the oldest first."""
    found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _read(file: Path) -> Saved:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{file} cannot be read: {type(error).__name__}: {error}. Remove {file.parent}, to go on from the "
            "checkpoint before it"
        ) from error


def _announce(part: Path, name: Path) -> None:
    part.rename(name)


def _sync(folder: Path) -> None:
    """Have the disk keep all that is in a folder: a crash of the machine must not undo what a rename announces."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
