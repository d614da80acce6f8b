"""Fingerprints of a checkpoint's files, to check that they are read as they were written."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshrl.errors import DataError


def fingerprint(content: bytes) -> str:
    """Return the fingerprint of bytes: BLAKE2b, 128 bits, in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprint of each file below a folder, by path. Raises DataError for links and special files."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    for path in files:
        if path.is_symlink() or not path.is_file():
            raise DataError(
                f"{path} is not a plain file, and a checkpoint has only plain files: copy the file that it points to"
            )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(
            zip((path.relative_to(folder).as_posix() for path in files), pool.map(_of_file, files), strict=True)
        )


def check_fingerprints(folder: Path, written: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise DataError if the files of a folder are not those that were written."""
    for name in sorted(written.keys() | found.keys()):
        if name not in found:
            raise DataError(f"{folder / name} is missing, but was written with this checkpoint")
        if name not in written:
            raise DataError(f"{folder / name} was not written with this checkpoint")
        if written[name] != found[name]:
            raise DataError(
                f"{folder / name} differs from what was written with this checkpoint: its fingerprint is "
                f"{found[name]}, and was {written[name]}"
            )


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
