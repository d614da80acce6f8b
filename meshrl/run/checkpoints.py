"""Checkpoints: folders that are complete or absent, and the state that a resumed run reads."""

import asyncio
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, DataError
from meshrl.roles import Stateful
from meshrl.tasks import CursorState

S = TypeVar("S", bound=Stateful)

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
"""Valid names for a script's state, distinct from those of actors and files."""
_METHODS: Final = ("checkpoint", "written", "restore")
"""Methods of a `Stateful` that a checkpoint calls. An actor on a mesh has them too without being an instance."""
_COMPLETE: Final = re.compile(r"step-(\d{6,})")
_RUN: Final = "run.json"
_FOLDER: Final = "checkpoints"
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Saved(msgspec.Struct, frozen=True):
    """The run's own state between two steps."""

    loop: _Count
    """Index of the current call of `run.steps`."""
    step: _Count
    """Next step of that loop."""
    done: _Count
    """Number of steps of all loops so far."""
    files: Mapping[str, _Count]
    """Size in bytes of each file that the run appends to."""
    once: Mapping[str, Mapping[str, float | str]]
    """Results of `run.once`. Values that are not finite are text."""
    data: CursorState
    fingerprints: Mapping[str, str] = {}
    """Fingerprints of the other files by path. Empty in checkpoints of older versions."""


class Checkpoints:
    """Checkpoints of one run, in `checkpoints/` of its folder. `step-000050` is the state after 50 steps.

    run.json    a `Saved`, and in a second line its fingerprint
    0-policy    the state of the first actor that has one: a folder for each, in the order of spawning
    memory      an object that the script keeps under this name
    """

    def __init__(self, run: Path, kept: int, resume: bool, check: Callable[[], None] = lambda: None) -> None:
        """Keep the newest `kept` checkpoints. With `resume`, continue from the newest undamaged one, if any.

        `check` raises if the folder belongs to another run. Raises DataError if all checkpoints are damaged.
        """
        self._folder = run.resolve() / _FOLDER
        self._check = check
        self._kept = kept
        self._actors: dict[str, Stateful] = {}
        self._places = 0
        self._writing: asyncio.Task[None] | None = None
        self._begun = False
        """True after a loop has begun. Earlier checkpoints would lack what is added later, and the run could not
        resume."""
        self._from: Path | None = None
        self.saved: Saved | None = None
        """The state to resume from. None in a new run."""
        if resume:
            self._clean_up()
            self._from, self.saved = _newest_undamaged(self._folder)

    def place(self, role: str) -> str:
        """Return the folder of an actor that is about to be spawned."""
        self._places += 1
        return f"{self._places - 1}-{role.lower()}"

    async def keep(self, name: str, state: S) -> S:
        """Keep an object of the script under a name.

        Raises DataError if the name is invalid or taken, if a loop has begun, or if the object lacks the methods.
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
        """Keep the state of a new actor from here on. In a resumed run, restore it first."""
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
        """Begin a loop. Raises ConfigError if the run resumes in it and an actor of the checkpoint was not spawned."""
        self._begun = True
        if self.saved is None or loop != self.saved.loop:
            return
        if lacking := [place for place in self._saved_places() if place not in self._actors]:
            raise ConfigError(
                f"{self._from} has {', '.join(lacking)}, which the script has not spawned or kept before its loop: its "
                "state would be lost. Resume with the script and the roles of the checkpoint"
            )

    async def write(self, saved: Saved, *, wait: bool) -> None:
        """Write a checkpoint, and remove the oldest. If that fails or is cancelled, the others are left unchanged.

        Writes nothing if a checkpoint of this step exists. Without `wait`, it returns when the actors have copied their
        states, and `settle` raises any later error.
        """
        await self.settle()
        self._check()
        name = f"step-{saved.done:06}"
        if (self._folder / name).is_dir():
            return
        part = self._folder / f".{name}-{secrets.token_hex(4)}"
        part.mkdir(parents=True)
        try:
            await _all(actor.checkpoint(str(part / place), wait=False) for place, actor in self._actors.items())
        except BaseException:
            await self._discard(part)
            raise
        self._writing = asyncio.create_task(self._finish(part, name, saved))
        if wait:
            await self.settle()

    async def settle(self, *, wait: bool = True) -> None:
        """Raise if the last checkpoint could not be written. With `wait`, wait until it is written."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        try:
            await writing
        except asyncio.CancelledError:  # the caller was cancelled
            writing.cancel()
            await asyncio.wait([writing])
            raise

    async def close(self, error: BaseException | None) -> None:
        """Finish the open checkpoint if the run failed, or discard it if the run was interrupted."""
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
            await _all(actor.written() for actor in self._actors.values())
            complete = msgspec.structs.replace(saved, fingerprints=await asyncio.to_thread(_fingerprints, part))
            (part / _RUN).write_bytes(_signed(msgspec.json.encode(complete)))
            await asyncio.to_thread(_sync, part)
            self._check()
            _announce(part, self._folder / name)
        except BaseException:
            await self._discard(part)
            raise
        for changed in (self._folder, *self._folder.parents[:2]):
            await asyncio.to_thread(_sync_one, changed)
        await asyncio.to_thread(self._clean_up)

    async def _discard(self, part: Path) -> None:
        """Remove an incomplete checkpoint after all actors have stopped writing."""
        await asyncio.gather(*(actor.written() for actor in self._actors.values()), return_exceptions=True)
        shutil.rmtree(part, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove old checkpoints, and any that are half-written or half-removed."""
        self._check()
        for old in _complete(self._folder)[: -self._kept]:
            old.rename(old.with_name(f".{old.name}-gone"))  # a half-removed checkpoint must not count as complete
        self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._folder.glob(".step-*"):
            shutil.rmtree(part)

    def _saved_places(self) -> list[str]:
        return sorted(each.name for each in self._from.iterdir() if each.is_dir()) if self._from else []


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of a run's newest checkpoint. None if there is none."""
    return next(reversed(_complete(run.resolve() / _FOLDER)), None)


def checkpoint_until(run: Path, step: int) -> Path | None:
    """Return the folder of a run's newest undamaged checkpoint after at most `step` steps. None if there is none."""
    for found in reversed(_complete(run.resolve() / _FOLDER)):
        if steps_of(found) > step:
            continue
        try:
            _read(found)
        except DataError as error:
            log.warning(f"{found} is damaged, and an earlier checkpoint is used", error=str(error))
        else:
            return found
    return None


def redeal_prompts(checkpoint: Path) -> None:
    """Make a run that resumes here deal its prompts from the beginning, in the order of its seed."""
    saved = _read(checkpoint)
    data = msgspec.structs.replace(saved.data, closed=len(saved.data.deals))
    part = checkpoint.parent / f".{_RUN}.part"  # outside the checkpoint, whose list of files is fixed
    part.write_bytes(_signed(msgspec.json.encode(msgspec.structs.replace(saved, data=data))))
    part.replace(checkpoint / _RUN)


def steps_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def as_json(once: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float | str]]:
    """Convert results of `run.once` to a form that JSON can hold."""
    return {
        name: {key: value if isfinite(value) else str(value) for key, value in numbers.items()}
        for name, numbers in once.items()
    }


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait until all calls have ended, then raise the first error. None of them is left running."""
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if error is not None:
            raise error


def _complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    found = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=steps_of)


def _newest_undamaged(folder: Path) -> tuple[Path, Saved] | tuple[None, None]:
    """Return the newest undamaged checkpoint. Newer, damaged ones are renamed."""
    damaged: list[tuple[Path, DataError]] = []
    for found in reversed(_complete(folder)):
        try:
            saved = _read(found)
        except DataError as error:
            damaged.append((found, error))
            continue
        for path, reason in damaged:
            aside = path.rename(path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}"))
            log.warning(f"a checkpoint is damaged, and is now {aside}; resuming from {found}", error=str(reason))
        return found, saved
    if damaged:
        path, reason = damaged[0]
        raise DataError(
            f"{reason}. There is no earlier checkpoint: restore that file, or remove {path} to start from the beginning"
        )
    return None, None


def _read(folder: Path) -> Saved:
    """Read the run's state in a checkpoint. Raises DataError if any file differs from what was written."""
    file = folder / _RUN
    try:
        content, _, sign = file.read_bytes().partition(b"\n")
        saved = msgspec.json.decode(content, type=Saved)
    except (OSError, RecursionError, ValueError) as error:  # from msgspec and from UTF-8
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    present = _fingerprints(folder)
    del present[_RUN]
    if (saved.fingerprints or sign) and sign != _fingerprint(content):
        raise DataError(f"{file} is not as it was written: its fingerprint differs")
    if saved.done != steps_of(folder):
        raise DataError(f"{file} is of a checkpoint after {saved.done} steps: the folder was renamed")
    if sign:
        _check_fingerprints(folder, saved.fingerprints, present)
    return saved


def _signed(content: bytes) -> bytes:
    return content + b"\n" + _fingerprint(content)


def _announce(part: Path, name: Path) -> None:
    part.rename(name)


def _sync(folder: Path) -> None:
    """Flush a folder's files to disk, so that a crash of the machine cannot undo what a rename announces."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _fingerprint(content: bytes) -> bytes:
    """Return the fingerprint of bytes: BLAKE2b, 128 bits, in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()


def _fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprint of each file below a folder, by path. Raises DataError for links and special files."""

    def of_file(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    files = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    for path in files:
        if path.is_symlink() or not path.is_file():
            raise DataError(
                f"{path} is not a plain file, and a checkpoint has only plain files: copy the file that it points to"
            )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        names = (path.relative_to(folder).as_posix() for path in files)
        return dict(zip(names, pool.map(of_file, files), strict=True))


def _check_fingerprints(folder: Path, written: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Raise DataError if the files of a folder are not those that were written."""
    for name in sorted(written.keys() | present.keys()):
        if name not in present:
            raise DataError(f"{folder / name} is missing, but was written with this checkpoint")
        if name not in written:
            raise DataError(f"{folder / name} was not written with this checkpoint")
        if written[name] != present[name]:
            raise DataError(
                f"{folder / name} differs from what was written with this checkpoint: its fingerprint is "
                f"{present[name]}, and was {written[name]}"
            )
