"""The small file next to a model's tensors in a checkpoint, which identifies their owner."""

from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from safetensors import SafetensorError

from meshrl.errors import ModelError

T = TypeVar("T")
REMEDY: Final = "resume with the configuration that the checkpoint was written with, or start a run with another name"
REMOVE: Final = "Remove the checkpoint that it belongs to, to resume from the one before"
_FILE: Final = "state.json"


class Numbers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about a model in training, besides its tensors."""

    role: str
    steps: int
    """Optimizer steps."""
    files: int | None = None
    """Number of files of tensors, if each rank writes one. A single rank omits it, as did older versions."""

    def write(self, folder: Path) -> None:
        """Write the file."""
        (folder / _FILE).write_bytes(msgspec.json.encode(self))


def opened(folder: Path, role: str, files: str, read: Callable[[], T]) -> tuple[Numbers, T]:
    """Return the numbers of a folder, and the result of `read`. ModelError if one fails, or the role differs.

    `files`: pattern of this backend's files of tensors. ModelError if there are only others.
    """
    said = _role(folder)
    if said not in ("", role):
        raise ModelError(f"{folder} is the state of a {said}, not of a {role}; {REMEDY}")
    there = sorted(each.name for each in folder.glob("*.safetensors"))
    if there and not any(fnmatch(name, files) for name in there):
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ModelError(
            f"{folder} is the state of a {role} that another backend has written: it has {there[0]}{more}, and this "
            f"backend reads {files}. Nothing is wrong with the checkpoint: resume with the `backend` that it was "
            "written with, or start a run with another name"
        )
    try:
        numbers = msgspec.json.decode((folder / _FILE).read_bytes(), type=Numbers)
        found = read()
    except (OSError, msgspec.DecodeError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder} cannot be read as the state of a {role}: {type(error).__name__}: {error}. {REMOVE}"
        ) from error
    return numbers, found


def another(folder: Path, role: str, name: str, there: str, here: str) -> ModelError:
    """Return the error for a tensor, `KIND/NAME`, that is described differently there and here."""
    return ModelError(
        f"{folder} is the state of another {role}: `{name.partition('/')[2]}` is {there} there and {here} here; "
        f"{REMEDY}"
    )


def _role(folder: Path) -> str:
    """Return the role whose state it is, from any backend. Empty if the file does not say."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Numbers).role
    return ""
