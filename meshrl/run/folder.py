"""The folder of a run: where it starts, what a resumed run finds there, and errors of its disk."""

import errno
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from meshrl import log
from meshrl.config import Table
from meshrl.errors import DataError, MeshrlError
from meshrl.observe import table_of
from meshrl.run.checkpoints import newest_checkpoint

T = TypeVar("T")
METRICS: Final = "metrics.jsonl"
SAMPLES: Final = "samples.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"
GROUPS: Final = "groups.jsonl"
GROWING: Final = (METRICS, SAMPLES, EVALUATIONS, GROUPS)
"""Files that a run appends to. A resumed run cuts them back to their size at the checkpoint."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_CLOSED: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


def start_folder(folder: Path) -> Path:
    """Return where a run writes until its first step: its folder, or `.NAME.next` if an earlier run's exists.

    Removes the `.NAME.next` of a run that made no step.
    """
    following = folder.with_name(f".{folder.name}.next")
    if following.is_dir():
        shutil.rmtree(following)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    return folder if is_free else following


def take_over(folder: Path, begun: Path) -> None:
    """Rename an earlier run's folder to the first free of NAME-1, NAME-2, ..., and `begun` to the folder."""
    aside = _first_free(lambda number: folder.with_name(f"{folder.name}-{number}"))
    folder.rename(aside)
    begun.rename(folder)
    log.info(f"{folder} existed already: the earlier run is now in {aside}")


def was_cut_short(folder: Path) -> bool:
    """True if the run in the folder can resume and did not finish, because it crashed or was interrupted."""
    file = folder / "summary.json"
    with suppress(OSError, ValueError):
        summary = msgspec.json.decode(file.read_bytes(), type=dict[str, object]) if file.exists() else {}
        run = table_of(read_configuration(folder), "run")
        return bool(run.get("resume") or run.get("restarts")) and summary.get("status") != "finished"
    return False


def restart_warning(folder: Path, checkpoint_every: int | None) -> str | None:
    """The message for a run with `resume` that finds no checkpoint. None for a first run that will write some."""
    if checkpoint_every is not None and not (folder.is_dir() and any(folder.iterdir())):
        return None
    hint = "" if checkpoint_every else "; set run.checkpoint_every = 50 to resume later runs"
    return f"run.resume = true, but there is no checkpoint in {folder}: the run starts from the beginning{hint}"


def changed_schedules(folder: Path, resolved: Mapping[str, object]) -> Iterator[str]:
    """Of a resumed run, yield a sentence for each learning-rate schedule whose end has changed."""
    with suppress(OSError, ValueError):
        earlier = read_configuration(folder)
        for role in resolved:
            before, now = (table_of(table_of(table, role), "optimizer") for table in (earlier, resolved))
            old, new = before.get("total_steps"), now.get("total_steps")
            if old != new and "constant" not in (before.get("schedule"), now.get("schedule")):
                yield (
                    f"{role}.optimizer.total_steps was {old} and is {new}: the learning rate has fallen toward 0 at "
                    f"{old}, and continues as if it had fallen toward {new} from the beginning. A run that starts with "
                    f"total_steps = {new} gives other numbers"
                )


def read_configuration(folder: Path) -> Table:
    """Return a run's recorded configuration. Raises OSError or ValueError if it cannot be read."""
    return tomllib.loads((folder / "config.toml").read_text("utf-8"))


def read_json(file: Path) -> Table:
    """Read a table from a file. Empty if there is no such file, or if it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, ValueError):  # also a path that no file can have
        return {}


def read_lines(
    file: Path, kind: type[T], *, may_be_cut: bool = False, remedy: str = "Restore the file, or run it again"
) -> Iterator[T]:
    """Yield the lines of a file. Raises DataError for one that is invalid.

    `may_be_cut`: a killed run may have left an incomplete last line.
    """
    lines = file.read_bytes().split(b"\n") if file.is_file() else [b""]
    if may_be_cut or not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        yield decoded(f"{file}, line {number}", line, kind, remedy)


def decoded(where: object, content: bytes, kind: type[T], remedy: str = "Restore the file, or run it again") -> T:
    """Decode what a run wrote as JSON. DataError if it did not write it like this."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # from msgspec and from UTF-8
        raise DataError(f"{where}: is not as a run wrote it: {error}. {remedy}") from error


def cut_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """Cut growing files back to the given sizes. Events of the earlier part move to a separate file."""
    if unknown := sorted(sizes.keys() - set(GROWING)):
        raise DataError(
            f"the checkpoint of {folder} names the files {', '.join(unknown)}, but a run only cuts "
            f"{', '.join(GROWING)}: it was damaged or changed. Remove it to resume from the checkpoint before it"
        )
    events = folder / "events.jsonl"
    if not sizes:  # discard everything of the earlier attempt
        for file in (events, *folder.glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)
    for name in GROWING:
        file, size = folder / name, sizes.get(name, 0)
        if file.is_symlink():
            raise DataError(f"{file} is a link, which a run does not follow: replace it by the file itself")
        present = file.stat().st_size if file.exists() else 0
        if present < size:
            raise DataError(
                f"{file} has {present} bytes, and had {size} when the checkpoint of the resumed run was written: "
                "restore it, or start a run with another name"
            )
        if present > size:
            os.truncate(file, size)
    if events.exists():
        events.rename(_first_free(lambda number: folder / f"events-{number}.jsonl"))


def _first_free(name: Callable[[int], Path]) -> Path:
    return next(path for path in map(name, count(1)) if not path.exists())


def explain_disk_error(error: BaseException, folder: Path) -> DataError | None:
    """Return an error that explains a disk's failure in a run's folder. None for other errors.

    It recognises failures on a rank too, which writes its part of a checkpoint there.
    """
    while isinstance(error, MeshrlError) and error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        what, do = "the disk is full", "make room there"
    elif error.errno == errno.EIO:
        what, do = "the disk failed", "look into the system's log"
    elif error.errno in _CLOSED and _is_near(error.filename, folder):
        what, do = "writing is not allowed", "let this user write there, or set run.folder to another place"
    else:
        return None
    newest = newest_checkpoint(folder)
    kept = f"; the newest whole checkpoint is {newest.name}, and run.resume=true continues from it" if newest else ""
    return DataError(f"{folder}: {what} ({error}): {do}{kept}")


def _is_near(name: object, folder: Path) -> bool:
    return isinstance(name, str | Path) and Path(name).absolute().is_relative_to(folder.absolute().parent)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically: it has the new or the old content, whenever the process ends."""
    part = part_of(file)
    part.write_bytes(content)
    part.replace(file)


def part_of(file: Path) -> Path:
    """Return where `write_whole` writes a file before it is whole."""
    return file.with_name(f".{file.name}.part")
