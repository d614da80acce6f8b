"""Errors of a disk that cannot take a run's files, with advice."""

import errno
from pathlib import Path
from typing import Final

from meshrl.errors import DataError, MeshrlError
from meshrl.run.checkpoints import newest_checkpoint

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_CLOSED: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


def of_the_disk(error: BaseException, folder: Path) -> DataError | None:
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
    elif error.errno in _CLOSED and _is_in(error.filename, folder):
        what, do = "writing is not allowed", "let this user write there, or set run.folder to another place"
    else:
        return None
    newest = newest_checkpoint(folder)
    kept = f"; the newest whole checkpoint is {newest.name}, and run.resume=true continues from it" if newest else ""
    return DataError(f"{folder}: {what} ({error}): {do}{kept}")


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically: it has the new or the old content, whenever the process ends."""
    part = part_of(file)
    part.write_bytes(content)
    part.replace(file)


def part_of(file: Path) -> Path:
    """Return where `write_whole` writes a file before it is whole."""
    return file.with_name(f".{file.name}.part")


def _is_in(name: object, folder: Path) -> bool:
    return isinstance(name, str | Path) and Path(name).absolute().is_relative_to(folder.absolute().parent)
