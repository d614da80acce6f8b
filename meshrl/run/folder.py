"""The folder of a run: where it starts, what happens to an earlier run's folder, and what a resumed run finds."""

import os
import shutil
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from meshrl import log
from meshrl.config import Table
from meshrl.errors import DataError
from meshrl.observe import table_of

EVENTS: Final = "events.jsonl"


def beginning(folder: Path) -> Path:
    """Return where a run writes until its first step: its folder, or `.NAME.next` if an earlier run's exists.

    Removes the `.NAME.next` of a run that made no step.
    """
    beside = folder.with_name(f".{folder.name}.next")
    if beside.is_dir():
        shutil.rmtree(beside)
    return beside if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())) else folder


def take(folder: Path, begun: Path) -> None:
    """Rename an earlier run's folder to the first free of NAME-1, NAME-2, ..., and `begun` to the folder."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    begun.rename(folder)
    log.info(f"{folder} existed already: the earlier run is now in {aside}")


def was_cut_short(folder: Path) -> bool:
    """True if the run in the folder can resume and did not finish, because it crashed or was interrupted."""
    summary = folder / "summary.json"
    with suppress(OSError, ValueError, msgspec.DecodeError):
        told = msgspec.json.decode(summary.read_bytes(), type=dict[str, object]) if summary.exists() else {}
        run = table_of(_configuration(folder), "run")
        return bool(run.get("resume") or run.get("restarts")) and told.get("status") != "finished"
    return False


def told_anew(folder: Path, checkpoint_every: int | None) -> str | None:
    """The message for a run with `resume` that finds no checkpoint. None for a first run that will write some."""
    if checkpoint_every is not None and not (folder.is_dir() and any(folder.iterdir())):
        return None
    hint = "" if checkpoint_every else "; set run.checkpoint_every = 50 to resume later runs"
    return f"run.resume = true, but there is no checkpoint in {folder}: the run starts from the beginning{hint}"


def rescheduled(folder: Path, resolved: Mapping[str, object]) -> Iterator[str]:
    """Of a resumed run, yield a sentence for each learning-rate schedule whose end has changed."""
    with suppress(OSError, ValueError):
        earlier = _configuration(folder)
        for role in resolved:
            was, now = (table_of(table_of(table, role), "optimizer") for table in (earlier, resolved))
            ends = was.get("total_steps"), now.get("total_steps")
            if ends[0] != ends[1] and "constant" not in (was.get("schedule"), now.get("schedule")):
                yield (
                    f"{role}.optimizer.total_steps was {ends[0]} and is {ends[1]}: the learning rate has fallen "
                    f"toward 0 at {ends[0]}, and continues as if it had fallen toward {ends[1]} from the beginning. A "
                    f"run that starts with total_steps = {ends[1]} gives other numbers"
                )


def _configuration(folder: Path) -> Table:
    """Return a run's recorded configuration. Raises OSError or ValueError if it cannot be read."""
    return tomllib.loads((folder / "config.toml").read_text("utf-8"))


def cut(folder: Path, sizes: Mapping[str, int], growing: Collection[str]) -> None:
    """Cut growing files back to the given sizes. Events of the earlier part move to a separate file."""
    if unknown := sorted(sizes.keys() - set(growing)):
        raise DataError(
            f"the checkpoint of {folder} names the files {', '.join(unknown)}, but a run only cuts "
            f"{', '.join(growing)}: it was damaged or changed. Remove it to resume from the checkpoint before it"
        )
    if not sizes:  # discard everything of the earlier attempt
        for file in (folder / EVENTS, *folder.glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)
    for name in growing:
        file, size = folder / name, sizes.get(name, 0)
        if file.is_symlink():
            raise DataError(f"{file} is a link, which a run does not follow: replace it by the file itself")
        there = file.stat().st_size if file.exists() else 0
        if there < size:
            raise DataError(
                f"{file} has {there} bytes, and had {size} when the checkpoint of the resumed run was written: "
                "restore it, or start a run with another name"
            )
        if there > size:
            os.truncate(file, size)
    if (folder / EVENTS).exists():
        number = 1
        while (aside := folder / f"events-{number}.jsonl").exists():
            number += 1
        (folder / EVENTS).rename(aside)
