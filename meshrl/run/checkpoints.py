"""Checkpoints: folders that are complete or absent, and the state that a resumed run reads."""

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, DataError
from meshrl.roles import Stateful
from meshrl.run.integrity import check_fingerprints, fingerprint, fingerprints
from meshrl.tasks import CursorState

S = TypeVar("S", bound=Stateful)

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
"""What a script may call its own state: no name of an actor or a file."""
_METHODS: Final = ("checkpoint", "written", "restore")
"""What a checkpoint calls of a `Stateful`; an actor on a mesh has them too, and is an instance of none."""
_WHOLE: Final = re.compile(r"step-(\d{6,})")
_RUN: Final = "run.json"
_FOLDER: Final = "checkpoints"
_DAMAGED: Final = "damaged-"
"""Before the name of a checkpoint that was not what had been written."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Saved(msgspec.Struct, frozen=True):
    """What the run itself has to know to go on, between two steps."""

    loop: _Count
    """Which of the script's calls of `run.steps`."""
    step: _Count
    """The step of that loop which comes next."""
    done: _Count
    """Steps of all loops so far."""
    files: Mapping[str, _Count]
    """Bytes of the run's files that are appended to."""
    once: Mapping[str, Mapping[str, float | str]]
    """What `run.once` measured; what is not finite as text."""
    data: CursorState
    fingerprints: Mapping[str, str] = {}
    """Of the other files, by their paths; nothing in a checkpoint of a version before."""


class Checkpoints:
    """Those of one run, in `checkpoints/` of its folder: `step-000050` holds what was after 50 steps.

    run.json    a `Saved`, and in a second line its fingerprint
    0-policy    what the first actor wrote that has a state: a folder for each, in the order of spawning
    memory      what the script keeps by this name
    """

    def __init__(self, run: Path, kept: int, resume: bool, check: Callable[[], None] = lambda: None) -> None:
        """`kept`: how many stay. With `resume` the run goes on from the newest that is not damaged, if there is one.

        `check`: raises where the folder is another run's. DataError where all that are there are damaged.
        """
        self._folder = run.resolve() / _FOLDER
        self._check = check
        self._kept = kept
        self._actors: dict[str, Stateful] = {}
        self._places = 0
        self._writing: asyncio.Task[None] | None = None
        self._begun = False
        """Whether a loop has: a checkpoint may lack what comes later, and the run could not resume from it."""
        self._from: Path | None = None
        self.saved: Saved | None = None
        """Where the run goes on from; None where it begins anew."""
        if resume:
            self._clean_up()
            self._from, self.saved = _newest_undamaged(self._folder)

    def place(self, role: str) -> str:
        """The folder of an actor that is about to be spawned."""
        self._places += 1
        return f"{self._places - 1}-{role.lower()}"

    async def keep(self, name: str, state: S) -> S:
        """Adopt what the script keeps by a name.

        DataError where that is no name, or has been given, where it is too late, and where the state has no methods
        for that.
        """
        if not _NAME.fullmatch(name):
            raise DataError(f"run.keep({name!r}): a name begins with a-z, and has a-z, 0-9 and _ alone")
        if name in self._actors:
            raise DataError(f"run.keep({name!r}): the script keeps something by that name already: choose another")
        if self._begun:
            raise DataError(
                f"run.keep({name!r}): the loop has begun, and its checkpoints may lack this state: call it before "
                "`run.steps`"
            )
        if lacking := [each for each in _METHODS if not callable(getattr(state, each, None))]:
            raise DataError(
                f"run.keep({name!r}): {type(state).__name__} has no {', '.join(lacking)}: derive it from "
                "`meshrl.Stateful`, which says what they do"
            )
        await self.adopt(name, state)
        return state

    async def adopt(self, place: str, actor: Stateful) -> None:
        """Keep the state of a fresh actor from here on; where the run goes on, restore it first."""
        if self._from:
            if not (self._from / place).is_dir():
                does = "keeps" if _NAME.fullmatch(place) else "spawns"
                raise ConfigError(
                    f"the script {does} {place}, which {self._from} lacks: it has {', '.join(self._saved_places())}. "
                    "Resume with the script and the roles of the checkpoint, or start a run with another name"
                )
            await actor.restore(str(self._from / place))
        self._actors[place] = actor

    def begin(self, loop: int) -> None:
        """A loop begins. ConfigError where the run goes on in it, from an actor that was not spawned before."""
        self._begun = True
        if self.saved is None or loop != self.saved.loop:
            return
        if lacking := [place for place in self._saved_places() if place not in self._actors]:
            raise ConfigError(
                f"{self._from} has {', '.join(lacking)}, which the script has not spawned or kept before its loop: its "
                "state would be lost. Resume with the script and the roles of the checkpoint"
            )

    async def write(self, saved: Saved, *, wait: bool) -> None:
        """Write a checkpoint, and remove the oldest. If that fails or is cancelled, the others are as they were.

        Nothing is written where there is one of as many steps, as where one is asked for twice. Without `wait` it
        returns when the actors have copied their states; `settle` tells how it ended.
        """
        await self.settle()
        self._check()
        name = f"step-{saved.done:06}"
        if (self._folder / name).is_dir():
            return
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
            told = msgspec.structs.replace(saved, fingerprints=await asyncio.to_thread(fingerprints, part))
            (part / _RUN).write_bytes(_signed(msgspec.json.encode(told)))
            await asyncio.to_thread(_sync, part)
            self._check()
            _announce(part, self._folder / name)
        except BaseException:
            await self._drop(part)
            raise
        for changed in (self._folder, *self._folder.parents[:2]):
            await asyncio.to_thread(_sync_one, changed)
        await asyncio.to_thread(self._clean_up)

    async def _drop(self, part: Path) -> None:
        """Remove what is half-written, when nobody writes there any more."""
        await asyncio.gather(*(actor.written() for actor in self._actors.values()), return_exceptions=True)
        shutil.rmtree(part, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove what is too old, or was left half-written or half-removed."""
        self._check()
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


def checkpoint_until(run: Path, step: int) -> Path | None:
    """The folder of a run's newest checkpoint that was written after at most so many steps; None where it has none."""
    found = reversed(_whole(run.resolve() / _FOLDER))
    return next((path for path in found if steps_of(path) <= step), None)


def deal_anew(checkpoint: Path) -> None:
    """Have a run that goes on from here deal its prompts from the beginning, in the order of whichever seed it has."""
    saved = _read(checkpoint)
    data = msgspec.structs.replace(saved.data, closed=len(saved.data.deals))
    part = checkpoint.parent / f".{_RUN}.part"  # not in the checkpoint, whose files are known
    part.write_bytes(_signed(msgspec.json.encode(msgspec.structs.replace(saved, data=data))))
    part.replace(checkpoint / _RUN)


def steps_of(checkpoint: Path) -> int:
    """After how many steps a checkpoint was written, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def as_json(once: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float | str]]:
    """What `run.once` measured, in a form that JSON can hold."""
    return {
        name: {key: value if isfinite(value) else str(value) for key, value in told.items()}
        for name, told in once.items()
    }


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait for the end of all, then raise what the first raised: none goes on after that."""
    for failed in await asyncio.gather(*works, return_exceptions=True):
        if failed is not None:
            raise failed


def _whole(folder: Path) -> list[Path]:
    """The checkpoints, the oldest first."""
    found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=steps_of)


def _newest_undamaged(folder: Path) -> tuple[Path, Saved] | tuple[None, None]:
    """The newest checkpoint that is what was written; those after it are set aside."""
    damaged: list[tuple[Path, DataError]] = []
    for found in reversed(_whole(folder)):
        try:
            saved = _read(found)
        except DataError as error:
            damaged.append((found, error))
            continue
        for path, why in damaged:
            aside = path.rename(path.with_name(f"{_DAMAGED}{path.name}-{secrets.token_hex(4)}"))
            log.warning(f"a checkpoint is damaged, and is now {aside}; resuming from {found}", error=str(why))
        return found, saved
    if damaged:
        path, why = damaged[0]
        raise DataError(
            f"{why}. There is no earlier checkpoint: restore that file, or remove {path} to start from the beginning"
        )
    return None, None


def _read(folder: Path) -> Saved:
    """A checkpoint's own file; DataError where it or another is not what was written."""
    file = folder / _RUN
    try:
        content, _, sign = file.read_bytes().partition(b"\n")
        saved = msgspec.json.decode(content, type=Saved)
    except (OSError, RecursionError, ValueError) as error:  # of msgspec and of UTF-8
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    found = fingerprints(folder)
    del found[_RUN]
    if (saved.fingerprints or sign) and sign != fingerprint(content).encode():
        raise DataError(f"{file} is not as it was written: its fingerprint differs")
    if saved.done != int(folder.name.removeprefix("step-")):
        raise DataError(f"{file} is of a checkpoint after {saved.done} steps: the folder was renamed")
    if sign:
        check_fingerprints(folder, saved.fingerprints, found)
    return saved


def _signed(content: bytes) -> bytes:
    return content + b"\n" + fingerprint(content).encode()


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
