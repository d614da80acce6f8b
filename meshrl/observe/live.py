"""The current state of a run for the page, from what is appended to its files, in bounded memory."""

import math
import os
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final, Generic, NamedTuple, TypeVar

import msgspec

from meshrl.config import Table
from meshrl.events import Delivery, Event, Gauge, Restart, Step
from meshrl.observe.page import POINTS, make_content
from meshrl.observe.run_files import (
    EVENT,
    FILES,
    LINE,
    LOOKS,
    NOW,
    PAUSED,
    SAMPLE,
    TOKENS,
    Line,
    Record,
    RunStatus,
    open_requests,
    sample_of,
    table_of,
)
from meshrl.observe.run_statistics import finite
from meshrl.observe.samples import ROWS, head_of

EVENTS: Final = 4000
"""Events kept at most, the newest. Beyond it, a quarter is dropped at once."""
_NEWEST: Final = 20
"""Newest steps that determine the speed."""
_NAMES: Final = 256
"""Numbers of a step at most. Others are left out."""
SILENT: Final = 10 * LOOKS
"""Seconds without a sign of life after which an unfinished run counts as silent."""
_CLOCKS: Final = 300.0
"""Largest difference between the clocks of two machines, in seconds."""
_CHUNK: Final = 1 << 24
"""Bytes per look at most. A longer line is left out."""
_SEEN: Final = 64
"""Bytes before the reached position that identify the file."""
K = TypeVar("K")
T = TypeVar("T")


class LiveRun:
    """The files of one run's folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = _GrowingFile(folder / "metrics.jsonl", LINE, Thinned, lambda kept, line, _: kept.add(line))
        self._evaluations = _GrowingFile(
            folder / "evaluations.jsonl", LINE, Thinned, lambda kept, line, _: kept.add(line)
        )
        self._samples = _GrowingFile(folder / "samples.jsonl", SAMPLE, _Samples, _Samples.add)
        self._events = _GrowingFile(folder / "events.jsonl", EVENT, _Events, lambda kept, event, _: kept.add(event))
        self._config, self._summary_file, self._now_file = (
            _RewrittenFile(folder / name) for name in ("config.toml", "summary.json", NOW)
        )
        self._state: tuple[str, list[str]] = "", []
        """Status and open requests at the last look."""
        self._page: dict[str, object] | None = None
        """Content of the report. None if something was read since."""

    def look(self) -> tuple[bool, bool]:
        """Read new content. Returns whether there is any, and whether more can be read at once."""
        report_changed = more = False
        for look in (self._metrics.look, self._evaluations.look, self._samples.look, self._events.look):
            with suppress(OSError):  # the folder may be moving, and the next look finds it
                has_grown, has_more = look()
                report_changed |= has_grown
                more |= has_more
        report_changed |= self._config.read()
        report_changed |= self._summary_file.read()
        now_changed = self._now_file.read()
        state = self.status, open_requests(self.folder)
        if report_changed or state != self._state:
            self._page, self._state, report_changed = None, state, True
        return report_changed or now_changed, more

    @property
    def now(self) -> RunStatus | None:
        """The run's current state. None if it is not running or is silent."""
        return _decoded(self._now_file.content, RunStatus) if self._now_file.age < SILENT else None

    def is_under_way(self) -> bool:
        """True if the run is alive. Reads the file again, because the last look may be old."""
        self._now_file.read()
        return bool(self._now_file.content) and self._now_file.age < SILENT

    @property
    def status(self) -> str:
        """The run's state: not begun, running, paused, silent, not ended, or how it ended."""
        if now := self.now:
            return "paused" if any(each.what == PAUSED for each in now.waits) else "running"
        if self._now_file.content and self._now_file.changed > self._summary_file.changed:
            return "silent"
        if self._summary_file.content:
            return str(self._summary.get("status", "not ended"))
        with suppress(OSError):  # if the disk does not respond
            if not any((self.folder / file).is_file() for file in FILES):
                return "not begun"
        return "not ended"

    @property
    def _summary(self) -> Line:
        return _decoded(self._summary_file.content, Line) or {}

    def content(self) -> dict[str, object]:
        """The page's content as plain values: the report's, and the current state."""
        config = self._config.content.decode("utf-8", "replace")
        if self._page is None:
            self._page = self._report(config)
        table = _table(config)
        return {
            **self._page,
            "now": msgspec.to_builtins(self.now),
            "pace": self._metrics.kept.pace(),
            "ahead": table.get("ahead"),
            "asked": open_requests(self.folder),
            "keeps": bool(table_of(table, "run").get("checkpoint_every")),
        }

    def tokens(self, at: int) -> bytes | None:
        """Read the tokens of the row with this number in samples.jsonl, as JSON. None if it has none, or is not there.

        Raises OSError if the file must not be read.
        """
        if (place := self._samples.kept.place(at)) is None:
            return None
        with (self.folder / "samples.jsonl").open("rb") as file:
            file.seek(place[0])
            line = file.read(place[1])
        try:
            return bytes(SAMPLE.decode(line).get(TOKENS, b"")) or None
        except ValueError:  # another run has begun meanwhile
            return None

    def _report(self, config: str) -> dict[str, object]:
        status, events = self.status, self._events.kept
        summary = self._summary if status in {"finished", "interrupted", "failed"} else self._metrics.kept.summary()
        record = Record(
            self.folder,
            {**summary, "status": status},
            self._metrics.kept.lines,
            (),
            events.shown(),
            config,
            self._notes(status),
            self._evaluations.kept.lines,
        )
        page: dict[str, object] = msgspec.to_builtins(make_content(record, self._samples.kept.heads()))
        return {**page, "staleness": events.behind(), "dropped": dict(events.dropped)}

    def _notes(self, status: str) -> list[str]:
        notes = [*self._metrics.notes, *self._evaluations.notes, *self._samples.notes, *self._events.notes]
        if status == "not begun":
            notes.append(f"There is no run in {self.folder} yet: the page shows it when it begins.")
        if status == "silent":
            notes.append(f"The run has not shown that it lives for {SILENT:g} s or more: was it killed?")
        if (steps := self._metrics.kept.count) > POINTS:
            notes.append(f"Curves have {len(self._metrics.kept.lines):,} points for {steps:,} steps.")
        if self._events.kept.dropped_until is not None:
            notes.append(f"Times are those of the newest {EVENTS:,} events; `meshrl report` shows all that were kept.")
        return notes


class Thinned:
    """Any number of lines of metrics.jsonl as at most POINTS, an even number: beyond it, pairs of points are joined."""

    def __init__(self) -> None:
        self.count: int = 0
        """Number of lines so far."""
        self._names: set[str] = set()
        self._steps: list[object] = []
        """Step of the first line of each point."""
        self._sums: list[dict[str, tuple[float, int]]] = []
        """Sum and count by name, of each point."""
        self._lines, self._most = 1, 1
        """Lines in the last point, and in each other."""
        self._newest: deque[Line] = deque(maxlen=_NEWEST)
        self._rewards: list[float] = []
        """The first and the last reward."""

    def add(self, line: Line) -> None:
        """Add a step."""
        self.count += 1
        self._newest.append(line)
        if self._lines == self._most or not self._sums:
            if len(self._sums) == POINTS:
                pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
                self._sums, self._steps = [_added(*pair) for pair in pairs], self._steps[::2]
                self._most *= 2
            self._sums.append({})
            self._steps.append(line.get("step"))
            self._lines = 0
        self._lines += 1
        numbers = {name: value for name, each in line.items() if (value := finite(each)) is not None}
        if "reward" in numbers:
            self._rewards[1:] = [numbers["reward"]]
        numbers.pop("step", None)
        self._names.update([name for name in numbers if name not in self._names][: _NAMES - len(self._names)])
        _added(self._sums[-1], {name: (numbers[name], 1) for name in numbers if name in self._names})

    @property
    def lines(self) -> list[Line]:
        """At most POINTS lines in the form of metrics.jsonl, and the original lines if there were no more."""
        return [
            {"step": step, **{name: total / count for name, (total, count) in sums.items()}}
            for step, sums in zip(self._steps, self._sums, strict=True)
        ]

    def summary(self) -> Line:
        """A summary so far."""
        first, last = (self._rewards[0], self._rewards[-1]) if self._rewards else (None, None)
        seconds = self._newest[-1].get("seconds") if self._newest else None
        return {"steps": self.count, "wall_s": seconds, "first_reward": first, "last_reward": last}

    def pace(self) -> dict[str, float]:
        """Speed and staleness of the newest steps. Unknown values are left out."""
        if not self._newest:
            return {}
        first, last = self._newest[0], self._newest[-1]
        pace = {name: value for name in ("staleness", "step_s") if (value := finite(last.get(name))) is not None}
        began, ended = finite(first.get("seconds")), finite(last.get("seconds"))
        if began is not None and ended is not None and ended > began:
            pace["steps_per_minute"] = 60 * (len(self._newest) - 1) / (ended - began)
            tokens = [finite(line.get("tokens")) for line in self._newest][1:]
            if all(each is not None for each in tokens):
                pace["tokens_per_second"] = sum(filter(None, tokens)) / (ended - began)
        return pace


def _added(sums: dict[str, tuple[float, int]], more: Mapping[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
    """Add to sums and counts by name, in place."""
    for name, (total, count) in more.items():
        before, so_far = sums.get(name, (0.0, 0))
        sums[name] = before + total, so_far + count
    return sums


class _Events:
    """The newest events of a run, and sums over all."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        """Dropped groups by reason."""
        self.dropped_until: float | None = None
        """End of the last event that was dropped. None if all are kept."""
        self._kept: deque[Event] = deque()
        self._restarts: deque[Restart] = deque(maxlen=8)
        self._staleness: Counter[int] = Counter()

    def add(self, event: Event) -> None:
        if isinstance(event, Restart):
            self._restarts.append(event)
            return
        if isinstance(event, Delivery):
            self.dropped.update(event.dropped)
            self._staleness.update(dict(enumerate(event.staleness)))
        self._kept.append(event)
        if len(self._kept) > EVENTS:
            for _ in range(EVENTS // 4 - 1):
                self._kept.popleft()
            last = self._kept.popleft()
            self.dropped_until = last.at if isinstance(last, Gauge | Delivery | Restart) else last.ended

    def shown(self) -> list[Event]:
        """Restarts and kept events, without steps that are incomplete."""
        since = -math.inf if self.dropped_until is None else self.dropped_until
        return [*self._restarts, *(each for each in self._kept if not isinstance(each, Step) or each.began >= since)]

    def behind(self) -> list[int]:
        """Rows that were 0, 1, 2, ... publications behind when they were delivered."""
        return [self._staleness[versions] for versions in range(max(self._staleness, default=-1) + 1)]


class _Samples:
    """The heads of the newest rows, and where their lines are."""

    def __init__(self) -> None:
        self._count = 0
        self._heads: deque[Line] = deque(maxlen=ROWS)
        self._places: dict[int, tuple[int, int]] = {}
        """By a row's number, which is a key because other threads ask while rows are added."""

    def add(self, fields: dict[str, msgspec.Raw], place: tuple[int, int]) -> None:
        self._heads.append(head_of(sample_of(fields), self._count))
        self._places[self._count] = place
        self._places.pop(self._count - ROWS, None)
        self._count += 1

    def heads(self) -> list[Line]:
        return [*self._heads]

    def place(self, at: int) -> tuple[int, int] | None:
        """The first byte and the size of a row's line. None if it is not kept."""
        return self._places.get(at)


class _GrowingFile(Generic[K, T]):
    """A file of lines that grows, and what is kept of them."""

    def __init__(
        self,
        path: Path,
        decoder: msgspec.json.Decoder[T],
        new: Callable[[], K],
        add: Callable[[K, T, tuple[int, int]], None],
    ) -> None:
        """`add` gets the first byte of a line and its size, too."""
        self.kept: K = new()
        self._name, self._bad = path.name, 0
        self._decoder, self._new, self._add = decoder, new, add
        self._tail = Tail(path)

    def look(self) -> tuple[bool, bool]:
        """Read new lines. Returns whether there are any, and whether more can be read at once."""
        read = self._tail.read()
        if read.anew:
            self.kept, self._bad = self._new(), 0
        at = read.at
        for line in read.lines:
            try:
                self._add(self.kept, self._decoder.decode(line), (at, len(line)))
            except (RecursionError, ValueError):
                self._bad += 1
            at += len(line) + 1
        return bool(read.lines) or read.anew, read.more

    @property
    def notes(self) -> list[str]:
        return [f"{self._bad:,} lines of {self._name} cannot be read, and are left out."] if self._bad else []


class NewLines(NamedTuple):
    """The lines that a look has read."""

    lines: list[bytes]
    anew: bool = False
    """True if these are the first lines of a file that is new, or was cut or replaced since the last look."""
    more: bool = False
    """True if another look finds more at once."""
    at: int = 0
    """Where the first line begins, in bytes."""


class Tail:
    """The complete lines of a file that another process appends to, each read once. A look reads a bounded part."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist yet."""
        self._path = path
        self._known: tuple[int, int, int] | None = None
        """Inode, size and time at the last look. If they are the same, nothing is new."""
        self._inode = -1
        self._reached = 0
        self._before = b""
        """The bytes before the reached position."""

    def read(self) -> NewLines:
        """Read the lines since the last look. Raises OSError if the file must not be read."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            was_there, self._known = self._known is not None, None
            self._inode = -1
            return NewLines([], anew=was_there)
        known = status.st_ino, status.st_size, status.st_mtime_ns
        if known == self._known:
            return NewLines([])
        with self._path.open("rb") as file:
            anew = not self._goes_on(file)
            if anew:
                self._inode, self._reached, self._before = os.fstat(file.fileno()).st_ino, 0, b""
            file.seek(self._reached)
            chunk = file.read(_CHUNK)
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == _CHUNK:
            end = _CHUNK  # the line is too long, and its end will not be taken as a line
        complete = chunk[:end]
        at, self._reached = self._reached, self._reached + len(complete)
        self._before = (self._before + complete)[-_SEEN:]
        more = len(chunk) == _CHUNK
        self._known = None if more else known
        return NewLines(complete.splitlines(), anew, more, at)

    def _goes_on(self, file: BinaryIO) -> bool:
        """True if this is the file of the last look, with the same content up to there."""
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._reached - len(self._before))
        return file.read(len(self._before)) == self._before


class _RewrittenFile:
    """A file that is rewritten each time, and its content."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content = b""
        """Empty if the file does not exist."""
        self.changed = 0.0
        """Modification time in seconds since 1970, by the writer's clock."""
        self._seen = -math.inf
        """When the change was seen here, on a monotonic clock."""

    def read(self) -> bool:
        """Read the file. True if it changed."""
        try:
            changed = self._path.stat().st_mtime
            if changed == self.changed:
                return False
            self.content, self.changed = self._path.read_bytes(), changed
            self._seen = time.monotonic() if time.time() - changed < _CLOCKS else -math.inf
        except OSError:
            was_there, self.content, self.changed = bool(self.changed), b"", 0.0
            return was_there
        return True

    @property
    def age(self) -> float:
        """Seconds since a change was seen. Infinite if the file was old when first seen."""
        return time.monotonic() - self._seen


def _decoded(content: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(content, type=kind)
    except (RecursionError, ValueError):
        return None


@lru_cache(maxsize=4)
def _table(config: str) -> Table:
    try:
        return tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
