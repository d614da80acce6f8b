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
from meshrl.errors import ConfigError, Damaged, DataError, SetAside, damage_of
from meshrl.roles import Stateful, Sums
from meshrl.tasks import CursorState

S = TypeVar("S", bound=Stateful)
T = TypeVar("T")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
"""Valid names for a script's state, distinct from those of actors and files."""
_METHODS: Final = ("checkpoint", "written", "restore")
"""Methods of a `Stateful` that a checkpoint calls. An actor on a mesh has them too without being an instance."""
_COMPLETE: Final = re.compile(r"step-(\d{6,})")
_DAMAGED: Final = re.compile(r"damaged-step-(\d{6,}).*")
_NO_EARLIER: Final = "There is no earlier checkpoint: restore that file, or remove {} to start from the beginning"
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
    contents: Mapping[str, tuple[_Count, str]]
    """Size and fingerprint of each other file of the checkpoint. No fingerprint if the file has `Sums`."""


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
        self._aside = ""
        """Why that was set aside, if a rank has found damage in it."""
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
        """Keep the state of a new actor from here on. In a resumed run, restore it first.

        SetAside if this or another actor has found damage, and the run can resume from an earlier checkpoint.
        """
        if self._from:
            if self._aside:
                raise SetAside(self._aside)
            if not (self._from / place).is_dir():
                does = "keeps" if _NAME.fullmatch(place) else "spawns"
                raise ConfigError(
                    f"the script {does} {place}, which {self._from} lacks: it has {', '.join(self._saved_places())}. "
                    "Resume with the script and the roles of the checkpoint, or start a run with another name"
                )
            try:
                await actor.restore(str(self._from / place))
            except Exception as error:
                damage = damage_of(error)
                if damage and not self._aside:
                    self._set_aside(self._from, damage)
                if self._aside:  # by another actor, perhaps, and this one found its files gone
                    raise SetAside(self._aside) from error
                if damage:
                    raise DataError(f"{damage}. {_NO_EARLIER.format(self._from)}") from error
                raise
        self._actors[place] = actor

    def _set_aside(self, checkpoint: Path, damage: Damaged) -> None:
        """Rename a checkpoint in which a rank found damage, if there is an earlier one."""
        self._check()
        earlier = checkpoint_until(self._folder.parent, steps_of(checkpoint) - 1, whole=False)
        if earlier:
            aside = _rename_damaged(checkpoint)
            log.warning(f"a checkpoint is damaged, and is now {aside}", error=str(damage))
            self._aside = f"{damage}. The checkpoint is now {aside}, and the same command resumes from {earlier}"

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
        states, and `settle` raises any later error. With it, they need no copy.
        """
        await self.settle()
        self._check()
        name = f"step-{saved.done:06}"
        if (self._folder / name).is_dir():
            return
        part = self._folder / f".{name}-{secrets.token_hex(4)}"
        part.mkdir(parents=True)
        try:
            await _all(actor.checkpoint(str(part / place), wait=wait) for place, actor in self._actors.items())
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
            complete = msgspec.structs.replace(saved, contents=await asyncio.to_thread(_contents, part))
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
        """Remove old checkpoints, damaged ones of their age, and any that are half-written or half-removed."""
        self._check()
        complete = _complete(self._folder)
        old, kept = complete[: -self._kept], complete[-self._kept :]
        for each in old:
            each.rename(each.with_name(f".{each.name}-gone"))  # a half-removed one must not count as complete
        for damaged in sorted(self._folder.glob("damaged-step-*/")):
            named = _DAMAGED.fullmatch(damaged.name)
            if named and kept and int(named[1]) < steps_of(kept[0]):
                log.info(f"removing {damaged}, a damaged checkpoint older than those that are kept")
                damaged.rename(damaged.with_name(f".step-{damaged.name}-gone"))
        self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._folder.glob(".step-*"):
            shutil.rmtree(part)

    def _saved_places(self) -> list[str]:
        return sorted(each.name for each in self._from.iterdir() if each.is_dir()) if self._from else []


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of a run's newest checkpoint. None if there is none."""
    return next(reversed(_complete(run.resolve() / _FOLDER)), None)


def checkpoint_until(run: Path, step: int, *, whole: bool = True) -> Path | None:
    """Return the folder of a run's newest undamaged checkpoint after at most `step` steps. None if there is none.

    With `whole`, tensors are verified too, which reads all of them.
    """
    for found in reversed(_complete(run.resolve() / _FOLDER)):
        if steps_of(found) > step:
            continue
        try:
            _read(found)
            if whole:
                _check_sums(found)
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
            aside = _rename_damaged(path)
            log.warning(f"a checkpoint is damaged, and is now {aside}; resuming from {found}", error=str(reason))
        return found, saved
    if damaged:
        path, reason = damaged[0]
        raise DataError(f"{reason}. {_NO_EARLIER.format(path)}")
    return None, None


def _rename_damaged(checkpoint: Path) -> Path:
    return checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}-{secrets.token_hex(4)}"))


def _read(folder: Path) -> Saved:
    """Read the run's state in a checkpoint. Raises DataError if a file differs from what was written.

    Of files with `Sums`, only the size is compared. The ranks verify what they read of them.
    """
    file = folder / _RUN
    try:
        content, _, sign = file.read_bytes().partition(b"\n")
        if sign != _fingerprint(content):
            raise DataError(f"{file} is not as it was written: its fingerprint differs")
        if lacking := set(Saved.__struct_fields__) - msgspec.json.decode(content, type=dict[str, object]).keys():
            raise ConfigError(
                f"{file} was written by an older version of meshrl: it lacks {', '.join(sorted(lacking))}. Resume with "
                "that version, or start a run with another name"
            )
        saved = msgspec.json.decode(content, type=Saved)
    except (OSError, RecursionError, ValueError) as error:  # from msgspec and from UTF-8
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if saved.done != steps_of(folder):
        raise DataError(f"{file} is of a checkpoint after {saved.done} steps: the folder was renamed")
    _check_contents(folder, saved.contents)
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


def _fingerprint_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """Return all files below a folder by their path in it. Raises DataError for links and special files."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise DataError(
                f"{path} is not a plain file, and a checkpoint has only plain files: copy the file that it points to"
            )
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the size and fingerprint of each file below a folder. No fingerprint of a file that has valid `Sums`."""

    def of_file(path: Path) -> tuple[int, str]:
        return path.stat().st_size, "" if _sums(path) else _fingerprint_file(path)

    files = _files(folder)
    return dict(zip(files, _in_threads(of_file, files.values()), strict=True))


def _check_contents(folder: Path, written: Mapping[str, tuple[int, str]]) -> None:
    """Raise DataError if the files of a folder are not those that were written."""
    files = _files(folder)
    del files[_RUN]
    for name in sorted(written.keys() | files.keys()):
        if name not in files:
            raise DataError(f"{folder / name} is missing, but was written with this checkpoint")
        if name not in written:
            raise DataError(f"{folder / name} was not written with this checkpoint")
        if (size := files[name].stat().st_size) != written[name][0]:
            raise DataError(
                f"{folder / name} differs from what was written with this checkpoint: it has {size} bytes, and had "
                f"{written[name][0]}"
            )
    small = [name for name, (_, fingerprint) in written.items() if fingerprint]
    for name, found in zip(small, _in_threads(_fingerprint_file, [files[name] for name in small]), strict=True):
        if found != written[name][1]:
            raise DataError(
                f"{folder / name} differs from what was written with this checkpoint: its fingerprint is {found}, and "
                f"was {written[name][1]}"
            )


def _check_sums(folder: Path) -> None:
    """Raise DataError if a file of tensors differs from its sums."""
    files = list(_files(folder).values())
    for path, differs in zip(files, _in_threads(_differs, files), strict=True):
        if differs:
            raise DataError(f"{path} differs from what was written with this checkpoint: its sums differ")


def _differs(path: Path) -> bool:
    sums = _sums(path)
    return sums is not None and not sums.matches(path)


def _sums(path: Path) -> Sums | None:
    """Return the sums of a file. None if it has none, or a file of another kind is so named."""
    try:
        sums = Sums.of(path)
    except ValueError:
        return None
    return sums if sums and sums.size == path.stat().st_size else None


def _in_threads(function: Callable[[Path], T], files: Iterable[Path]) -> list[T]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, files))
