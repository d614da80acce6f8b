"""The files of a run: what it recorded, which may be missing or cut; what it does now; and requests to it."""

import stat
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from meshrl.config import Table
from meshrl.errors import ConfigError, did_you_mean
from meshrl.events import Event

FILES: Final = ("config.toml", "metrics.jsonl", "samples.jsonl", "events.jsonl", "summary.json")
"""Files of a run's folder. Any may be missing."""
_WRITTEN: Final = FILES[1:]
"""Files that only a run writes. A project's folder may contain a configuration too."""
NOW: Final = "now.json"
"""File in the folder of a running run: a `RunStatus`, rewritten each second and removed at the run's end."""
LOOKS: Final = 1.0
"""Longest time between two looks, in seconds."""
PAUSED: Final = "the end of a pause"
"""What a paused script waits for."""
CONTROL: Final = "control"
"""Folder of the requests, which are files."""
REQUESTS: Final = ("pause", "checkpoint", "stop")
Command: TypeAlias = Literal["pause", "resume", "checkpoint", "stop"]
Line: TypeAlias = dict[str, object]

LINE: Final = msgspec.json.Decoder(Line)
SAMPLE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Decodes a line of samples.jsonl, with values that stay JSON: most of it are tokens, which few look at."""
TOKENS: Final = "tokens"
"""The key of a sample with one list for each quantity of its tokens."""
EVENT: Final = msgspec.json.Decoder[Event](Event)
_RUNS: Final = Path("runs")
T = TypeVar("T")


class Waits(msgspec.Struct, frozen=True):
    """A task that waits: `trainer` for `a batch`, `3 of 64 groups are ready`."""

    who: str
    what: str
    on: str
    seconds: float
    """Seconds so far."""


class Runs(msgspec.Struct, frozen=True):
    """A running call: `Policy.update` on `rank 0 (...)`."""

    where: str
    ranks: str
    seconds: float
    """Seconds so far."""


class RunStatus(msgspec.Struct, frozen=True):
    """The state of a run at one moment."""

    at: float
    """Seconds since its start."""
    waits: list[Waits]
    calls: list[Runs]
    memory: int | None = None
    """Memory of the run's processes on its machine, in bytes. None if unknown."""


def ask(run: Path, command: Command) -> None:
    """Send a request to a run, by its folder. The run carries it out before its next step. OSError if writing fails."""
    folder = run / CONTROL
    folder.mkdir(exist_ok=True)
    if command == "resume":
        (folder / "pause").unlink(missing_ok=True)
    else:
        (folder / command).touch()


def open_requests(run: Path) -> list[str]:
    """Return the open requests to a run."""
    return [each for each in REQUESTS if requested_at(run / CONTROL / each)]


def requested_at(file: Path) -> int:
    """Return when a request was written, in nanoseconds. 0 if there is no readable request."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else 0


@dataclass(frozen=True)
class Record:
    """The content of a run's files."""

    folder: Path
    summary: Line = field(default_factory=dict)
    metrics: Sequence[Line] = ()
    samples: Sequence[Line] = ()
    """The rows that the run kept. The lists of their `tokens` stay JSON, as `msgspec.Raw`."""
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


def read_run(folder: Path) -> Record:
    """Read a run's files as far as possible. Never raises for their content: `notes` lists what is wrong."""
    notes: list[str] = []
    config, fork = folder / "config.toml", folder / "fork.json"
    return Record(
        folder,
        _summary(folder, notes),
        _lines(folder / "metrics.jsonl", LINE, notes),
        [*map(sample_of, _lines(folder / "samples.jsonl", SAMPLE, notes))],
        read_events(folder / "events.jsonl", notes),
        config.read_text("utf-8", "replace") if config.is_file() else "",
        notes,
        _optional_lines(folder / "evaluations.jsonl", notes),
        _optional_lines(folder / "held_out.jsonl", notes),
        _object(fork, notes) if fork.is_file() else {},
    )


def sample_of(fields: Mapping[str, msgspec.Raw]) -> Line:
    """Return a sample with plain values. Its tokens stay JSON, as `msgspec.Raw`."""
    return {name: value if name == TOKENS else msgspec.json.decode(value) for name, value in fields.items()}


def read_numbers(folder: Path) -> Record:
    """Read the numbers of a run's steps and evaluations, without its samples and events."""
    notes: list[str] = []
    return Record(
        folder,
        _summary(folder, notes),
        _lines(folder / "metrics.jsonl", LINE, notes),
        notes=notes,
        evaluations=_optional_lines(folder / "evaluations.jsonl", notes),
    )


def read_events(file: Path, notes: list[str]) -> list[Event]:
    """Read the events of a file. Missing or damaged parts are added to `notes`."""
    return _lines(file, EVENT, notes)


def table_of(table: Mapping[str, object], name: str) -> Table:
    """Return a table of a table. A missing one is empty."""
    inner = table.get(name)
    return dict(inner) if isinstance(inner, Mapping) else {}


def find_run(name: str) -> Path:
    """Return the folder at this path, or the run of this name under runs/. Raises ConfigError if neither or both exist.

    A folder that contains only a config.toml counts as a project, not as a run. `./NAME` is always a path.
    """
    places = [Path(name)] if _is_path(name) else [Path(name), _RUNS / name]
    folders = [folder for folder in places if folder.is_dir()]
    of_runs = [folder for folder in folders if any((folder / file).is_file() for file in _WRITTEN)]
    if len({folder.resolve() for folder in of_runs}) > 1:
        raise ConfigError(
            f"{name} may be ./{name} or {_RUNS / name}, and both are folders of runs: write the path of one"
        )
    if of_runs:
        return of_runs[0]
    known = sorted(path.name for path in _RUNS.glob("[!.]*") if path.is_dir() and path not in folders)
    if near := did_you_mean(name, known, "{}"):
        hint = near
    elif known:
        hint = f"runs/ has {', '.join(known[:10])}{' and more' if len(known) > 10 else ''}"
    else:
        hint = f"there are no runs under {_RUNS.resolve()}: start one with `meshrl run`, or name a folder"
    if folders:
        which, are = " and ".join(map(str, folders)), "are not folders" if len(folders) > 1 else "is not the folder"
        raise ConfigError(f"{which} {are} of a run: none of {', '.join(_WRITTEN)} is there; {hint}")
    raise ConfigError(f"{name}: no such run; {hint}")


def run_to_watch(name: str | None) -> tuple[Path, str]:
    """Return the folder of this run, or of the newest under runs/, and a message about it.

    A named run need not exist yet. Raises ConfigError if the name fits two runs, or if no run is named and none exists.
    """
    if name is None:
        newest = max(_RUNS.glob("[!.]*"), key=_last_write, default=_RUNS)
        if not _last_write(newest):
            raise ConfigError(f"there are no runs under {_RUNS.resolve()}: name the run that will start, or a folder")
        return newest, f"the newest run is {newest}"
    try:
        return find_run(name), ""
    except ConfigError as error:
        folder = Path(name) if _is_path(name) else _RUNS / name
        if _last_write(folder):
            raise
        return folder, f"{error}; waiting for {folder} to start"


def _is_path(name: str) -> bool:
    return name.startswith((".", "/")) or Path(name).parts[:1] == _RUNS.parts


def _last_write(folder: Path) -> float:
    """When a run last wrote into the folder, in seconds since 1970. 0 if none did."""
    times = [0.0]
    for file in _WRITTEN:
        with suppress(OSError):  # a run that begins renames another's folder
            times.append((folder / file).stat().st_mtime)
    return max(times)


def _summary(folder: Path, notes: list[str]) -> Line:
    file = folder / "summary.json"
    if not file.is_file():
        notes.append(f"There is no {file.name}: the run has not ended, or was killed.")
        return {}
    return _object(file, notes)


def _object(file: Path, notes: list[str]) -> Line:
    try:
        return LINE.decode(file.read_bytes())
    except ValueError as error:
        notes.append(f"{file.name} cannot be read: {error}.")
        return {}


def _optional_lines(file: Path, notes: list[str]) -> Sequence[Line]:
    return _lines(file, LINE, notes) if file.is_file() else ()


def _lines(file: Path, decoder: msgspec.json.Decoder[T], notes: list[str]) -> list[T]:
    if not file.is_file():
        without = ", so it is unknown when the ranks ran which calls" if file.name == "events.jsonl" else ""
        notes.append(f"There is no {file.name}{without}.")
        return []
    content = file.read_bytes()
    with suppress(ValueError):  # includes invalid UTF-8
        return decoder.decode_lines(content)
    values: list[T] = []
    lines = [line for line in content.splitlines() if line]
    for line in lines:
        with suppress(ValueError):
            values.append(decoder.decode(line))
    bad = len(lines) - len(values)
    notes.append(f"{bad} of the {len(lines)} lines of {file.name} cannot be read, and are left out.")
    return values
