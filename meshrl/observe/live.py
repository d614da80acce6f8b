"""The current state of a run for the page, from what is appended to its files, in bounded memory."""

import math
import sys
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from meshrl.config import Table
from meshrl.events import Delivery, Event, Gauge, Restart, Step
from meshrl.observe.content import make_content
from meshrl.observe.reading import FILES, Line, Record, table_of
from meshrl.observe.signals import LOOKS, NOW, PAUSED, Now, asked
from meshrl.observe.tail import Tail
from meshrl.observe.thinned import POINTS, Thinned

EVENTS: Final = 4000
"""Events kept at most, the newest. Beyond it, a quarter is dropped at once."""
SAMPLES: Final = 64
"""Samples kept at most, the newest."""
PACE: Final = 20
"""Newest steps that determine the speed."""
SILENT: Final = 10 * LOOKS
"""Seconds without a sign of life after which an unfinished run counts as silent."""
CLOCKS: Final = 300.0
"""Largest difference between the clocks of two machines, in seconds."""

_LINES: Final = msgspec.json.Decoder(Line)
_EVENTS: Final = msgspec.json.Decoder[Event](Event)
T = TypeVar("T")


class Live:
    """The files of one run's folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._evaluations = Thinned(), Thinned()
        self._newest: deque[Line] = deque(maxlen=PACE)
        self._rewards: list[float] = []
        """The first and the last reward."""
        self._samples: deque[Line] = deque(maxlen=SAMPLES)
        self._events = Events()
        self._bad: Counter[str] = Counter()
        """Number of unreadable lines by file."""
        self._read: dict[str, Callable[[Sequence[bytes], bool], None]] = {
            "metrics.jsonl": self._take_metrics,
            "evaluations.jsonl": self._take_evaluations,
            "samples.jsonl": self._take_samples,
            "events.jsonl": self._take_events,
        }
        self._tails = {name: Tail(folder / name) for name in self._read}
        self._small = {name: _Small(folder / name) for name in ("config.toml", "summary.json", NOW)}
        self._told: tuple[str, list[str]] = "", []
        self._page: dict[str, object] | None = None
        """Content of the report. None if something was read since."""

    def look(self) -> tuple[bool, bool]:
        """Read new content. Returns whether there is any, and whether more can be read at once."""
        changed = more = False
        for name, tail in self._tails.items():
            with suppress(OSError):  # the folder may be moving, and the next look finds it
                grown = tail.read()
                if grown.lines or grown.anew:
                    self._page, changed = None, True
                    self._read[name](grown.lines, grown.anew)
                more |= grown.more
        for name, small in self._small.items():
            if small.read():
                self._page, changed = self._page if name == NOW else None, True
        told = self.status, asked(self.folder)
        if told != self._told:
            self._page, self._told, changed = None, told, True
        return changed, more

    @property
    def now(self) -> Now | None:
        """The run's current state. None if it is not running or is silent."""
        file = self._small[NOW]
        return _read(file.content, Now) if file.age < SILENT else None

    def is_under_way(self) -> bool:
        """True if the run is alive. Reads the file again, because the last look may be old."""
        file = self._small[NOW]
        file.read()
        return bool(file.content) and file.age < SILENT

    @property
    def status(self) -> str:
        """The run's state: not begun, running, paused, silent, not ended, or how it ended."""
        if now := self.now:
            return "paused" if any(each.what == PAUSED for each in now.waits) else "running"
        summary, alive = self._small["summary.json"], self._small[NOW]
        if alive.content and alive.changed > summary.changed:
            return "silent"
        if summary.content:
            return str(self._summary.get("status", "not ended"))
        with suppress(OSError):  # if the disk does not respond
            if not any((self.folder / file).is_file() for file in FILES):
                return "not begun"
        return "not ended"

    @property
    def _summary(self) -> Line:
        return _read(self._small["summary.json"].content, Line) or {}

    def content(self) -> dict[str, object]:
        """The page's content as plain values: the report's, and the current state."""
        config = self._small["config.toml"].content.decode("utf-8", "replace")
        if self._page is None:
            self._page = self._report(config)
        table = _table(config)
        return {
            **self._page,
            "now": msgspec.to_builtins(self.now),
            "pace": self._pace(),
            "ahead": table.get("ahead"),
            "asked": asked(self.folder),
            "keeps": bool(table_of(table, "run").get("checkpoint_every")),
        }

    def _report(self, config: str) -> dict[str, object]:
        status = self.status
        ended = status in {"finished", "interrupted", "failed"}
        summary = self._summary if ended else self._so_far()
        record = Record(
            self.folder,
            {**summary, "status": status},
            self._metrics.lines,
            list(self._samples),
            self._events.shown(),
            config,
            self._notes(status),
            self._evaluations.lines,
        )
        page: dict[str, object] = msgspec.to_builtins(make_content(record))
        return {**page, "staleness": self._events.behind(), "dropped": dict(self._events.dropped)}

    def _so_far(self) -> Line:
        """A summary so far."""
        seconds = self._newest[-1].get("seconds") if self._newest else None
        first, last = (self._rewards[0], self._rewards[-1]) if self._rewards else (None, None)
        return {"steps": self._metrics.count, "wall_s": seconds, "first_reward": first, "last_reward": last}

    def _pace(self) -> dict[str, float]:
        """Speed and staleness of the newest steps. Unknown values are left out."""
        found = {name: value for name in ("staleness", "step_s") if (value := self._number(-1, name)) is not None}
        first, last = self._number(0, "seconds"), self._number(-1, "seconds")
        if first is not None and last is not None and last > first:
            steps = len(self._newest) - 1
            found["steps_per_minute"] = 60 * steps / (last - first)
            tokens = [self._number(at, "tokens") for at in range(1, steps + 1)]
            if all(each is not None for each in tokens):
                found["tokens_per_second"] = sum(filter(None, tokens)) / (last - first)
        return found

    def _number(self, at: int, name: str) -> float | None:
        value = self._newest[at].get(name) if self._newest else None
        return _finite(value)

    def _notes(self, status: str) -> list[str]:
        """Notes for the page."""
        notes = [f"{bad:,} lines of {name} cannot be read, and are left out." for name, bad in self._bad.items() if bad]
        if status == "not begun":
            notes.append(f"There is no run in {self.folder} yet: the page shows it when it begins.")
        if status == "silent":
            notes.append(f"The run has not shown that it lives for {SILENT:g} s or more: was it killed?")
        if self._metrics.count > POINTS:
            notes.append(f"Curves have {len(self._metrics.lines):,} points for {self._metrics.count:,} steps.")
        if self._events.dropped_until is not None:
            notes.append(f"Times are those of the newest {EVENTS:,} events; `meshrl report` shows all that were kept.")
        return notes

    def _take_metrics(self, lines: Sequence[bytes], anew: bool) -> None:
        if anew:
            self._metrics, self._rewards, self._bad["metrics.jsonl"] = Thinned(), [], 0
            self._newest.clear()
        for line in self._decoded("metrics.jsonl", lines):
            self._metrics.add(line)
            self._newest.append(line)
            if (reward := _finite(line.get("reward"))) is not None:
                self._rewards[1:] = [reward]

    def _take_evaluations(self, lines: Sequence[bytes], anew: bool) -> None:
        if anew:
            self._evaluations, self._bad["evaluations.jsonl"] = Thinned(), 0
        for line in self._decoded("evaluations.jsonl", lines):
            self._evaluations.add(line)

    def _take_samples(self, lines: Sequence[bytes], anew: bool) -> None:
        if anew:
            self._bad["samples.jsonl"] = 0
            self._samples.clear()
        self._samples.extend(self._decoded("samples.jsonl", lines[-SAMPLES:]))

    def _take_events(self, lines: Sequence[bytes], anew: bool) -> None:
        if anew:
            self._events, self._bad["events.jsonl"] = Events(), 0
        for line in lines:
            try:
                self._events.add(_EVENTS.decode(line))
            except (RecursionError, ValueError):
                self._bad["events.jsonl"] += 1

    def _decoded(self, name: str, lines: Sequence[bytes]) -> Iterator[Line]:
        for line in lines:
            try:
                yield _LINES.decode(line)
            except (RecursionError, ValueError):
                self._bad[name] += 1


class Events:
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
        """Add an event."""
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
            gone = self._kept.popleft()
            self.dropped_until = gone.at if isinstance(gone, Gauge | Delivery | Restart) else gone.ended

    def shown(self) -> list[Event]:
        """Restarts and kept events, without steps that are incomplete."""
        since = self.dropped_until
        return [*self._restarts, *(each for each in self._kept if since is None or not _began_before(each, since))]

    def behind(self) -> list[int]:
        """Rows that were 0, 1, 2, ... publications behind when they were delivered."""
        return [self._staleness[versions] for versions in range(max(self._staleness, default=-1) + 1)]


class _Small:
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
            self._seen = time.monotonic() if time.time() - changed < CLOCKS else -math.inf
        except OSError:
            was_there, self.content, self.changed = bool(self.changed), b"", 0.0
            return was_there
        return True

    @property
    def age(self) -> float:
        """Seconds since a change was seen. Infinite if the file was old when first seen."""
        return time.monotonic() - self._seen


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _began_before(event: Event, since: float) -> bool:
    return isinstance(event, Step) and event.began < since


def _read(content: bytes, of: type[T]) -> T | None:
    try:
        return msgspec.json.decode(content, type=of)
    except (RecursionError, ValueError):
        return None


@lru_cache(maxsize=4)
def _table(config: str) -> Table:
    try:
        return tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
