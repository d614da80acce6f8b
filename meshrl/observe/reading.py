"""Read the files of a run as far as possible: any may be missing, short, or cut within a line."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from meshrl.config import Table
from meshrl.errors import ConfigError, did_you_mean
from meshrl.events import Event

FILES = ("config.toml", "metrics.jsonl", "samples.jsonl", "events.jsonl", "summary.json")
"""Files of a run's folder. Any may be missing."""
_WRITTEN = FILES[1:]
"""Files that only a run writes. A project's folder may contain a configuration too."""

_WITHOUT = {"events.jsonl": ", so it is unknown when the ranks ran which calls"}
"""What the page lacks without a file."""

Line = dict[str, object]
T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """The content of a run's files."""

    folder: Path
    summary: Line = field(default_factory=dict)
    metrics: Sequence[Line] = ()
    samples: Sequence[Line] = ()
    events: Sequence[Event] = ()
    config: str = ""
    notes: Sequence[str] = ()
    """Missing or damaged files, one sentence each."""
    evaluations: Sequence[Line] = ()
    held_out: Sequence[Line] = ()
    """Held-out prompts with their final results."""
    lineage: Line = field(default_factory=dict)
    """Of a fork: `run`, the folder of the earlier run, `step`, and `changed`, a list of settings."""

    @property
    def table(self) -> Line:
        """The configuration. Empty if it cannot be read."""
        try:
            return tomllib.loads(self.config)
        except tomllib.TOMLDecodeError:
            return {}

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name


def find_run(name: str) -> Path:
    """Return the folder at this path, or the run of this name under runs/. Raises ConfigError if neither or both exist.

    A folder that contains only a config.toml counts as a project, not as a run. `./NAME` is always a path.
    """
    runs = Path("runs")
    is_path = name.startswith((".", "/")) or Path(name).parts[:1] == runs.parts
    places = [Path(name)] if is_path else [Path(name), runs / name]
    folders = [folder for folder in places if folder.is_dir()]
    found = [folder for folder in folders if any((folder / file).is_file() for file in _WRITTEN)]
    if len({folder.resolve() for folder in found}) > 1:
        raise ConfigError(
            f"{name} may be ./{name} or {runs / name}, and both are folders of runs: write the path of one"
        )
    if found:
        return found[0]
    known = sorted(path.name for path in runs.glob("[!.]*") if path.is_dir() and path not in folders)
    if near := did_you_mean(name, known, "{}"):
        hint = near
    elif known:
        hint = f"runs/ has {', '.join(known[:10])}{' and more' if len(known) > 10 else ''}"
    else:
        hint = f"there are no runs under {runs.resolve()}: start one with `meshrl run`, or name a folder"
    if folders:
        which, are = " and ".join(map(str, folders)), "are not folders" if len(folders) > 1 else "is not the folder"
        raise ConfigError(f"{which} {are} of a run: none of {', '.join(_WRITTEN)} is there; {hint}")
    raise ConfigError(f"{name}: no such run; {hint}")


def read_run(folder: Path) -> Record:
    """Read a run's files as far as possible. Never raises for their content: `notes` lists what is wrong."""
    notes: list[str] = []
    lines, config = msgspec.json.Decoder(Line), folder / "config.toml"
    return Record(
        folder,
        _summary(folder / "summary.json", notes),
        _lines(folder / "metrics.jsonl", lines, notes),
        _lines(folder / "samples.jsonl", lines, notes),
        read_events(folder / "events.jsonl", notes),
        config.read_text("utf-8", "replace") if config.is_file() else "",
        notes,
        _lines_if_there(folder / "evaluations.jsonl", notes),
        _lines_if_there(folder / "held_out.jsonl", notes),
        _object(folder / "fork.json", notes) if (folder / "fork.json").is_file() else {},
    )


def read_numbers(folder: Path) -> Record:
    """Read the numbers of a run's steps and evaluations, without its samples and events."""
    notes: list[str] = []
    return Record(
        folder,
        _summary(folder / "summary.json", notes),
        _lines(folder / "metrics.jsonl", msgspec.json.Decoder(Line), notes),
        notes=notes,
        evaluations=_lines_if_there(folder / "evaluations.jsonl", notes),
    )


def read_events(file: Path, notes: list[str]) -> list[Event]:
    """Read the events of a file. Missing or damaged parts are added to `notes`."""
    return _lines(file, msgspec.json.Decoder[Event](Event), notes)


def _summary(file: Path, notes: list[str]) -> Line:
    if not file.is_file():
        notes.append(f"There is no {file.name}: the run has not ended, or was killed.")
        return {}
    return _object(file, notes)


def _object(file: Path, notes: list[str]) -> Line:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Line)
    except ValueError as error:
        notes.append(f"{file.name} cannot be read: {error}.")
        return {}


def _lines_if_there(file: Path, notes: list[str]) -> Sequence[Line]:
    """The lines of a file that may be missing."""
    return _lines(file, msgspec.json.Decoder(Line), notes) if file.is_file() else ()


def _lines(file: Path, decoder: msgspec.json.Decoder[T], notes: list[str]) -> list[T]:
    if not file.is_file():
        notes.append(f"There is no {file.name}{_WITHOUT.get(file.name, '')}.")
        return []
    content = file.read_bytes()
    try:
        return decoder.decode_lines(content)
    except ValueError:  # includes invalid UTF-8
        pass  # a single line is invalid: the lines are read one by one
    found: list[T] = []
    bad = 0
    for line in filter(None, content.splitlines()):
        try:
            found.append(decoder.decode(line))
        except ValueError:
            bad += 1
    notes.append(f"{bad} of the {len(found) + bad} lines of {file.name} cannot be read, and are left out.")
    return found


def table_of(table: Mapping[str, object], name: str) -> Table:
    """Return a table of a table. A missing one is empty."""
    found = table.get(name)
    return dict(found) if isinstance(found, Mapping) else {}
