"""What happens in a run, as events: the JSON lines that the report, the trace and the simulator read.

Times are seconds on one clock, the controller's event loop's, from the start of the run.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Protocol, TypeAlias

import msgspec

_FLUSH_SECONDS: Final = 1.0


class Call(msgspec.Struct, tag_field="kind", tag="call", frozen=True, omit_defaults=True):
    """An endpoint's call as its caller saw it, from sending to the joined result. Of a stream: to its end."""

    id: int
    actor: str
    endpoint: str
    began: float
    ended: float
    rows: int | None = None
    """Rows of the batches among the arguments."""
    tokens: int | None = None
    error: str | None = None
    """The type of what it raised."""


class Span(msgspec.Struct, tag_field="kind", tag="span", frozen=True, omit_defaults=True):
    """The same call as it ran on one rank."""

    call: int
    mesh: str
    rank: int
    """With `mesh`, the process or thread; actors that share it are colocated."""
    actor: str
    endpoint: str
    began: float
    ended: float


class Wait(msgspec.Struct, tag_field="kind", tag="wait", frozen=True, omit_defaults=True):
    """Somebody could not go on: `trainer` waited for `a batch`, `3 of 64 groups are ready`."""

    who: str
    what: str
    on: str
    """Whom or what it was blocked by, as a text."""
    began: float
    ended: float


class Gauge(msgspec.Struct, tag_field="kind", tag="gauge", frozen=True, omit_defaults=True):
    """A number that goes up and down, such as the groups that are ready. It holds until the next of its name."""

    name: str
    at: float
    value: float


class Swap(msgspec.Struct, tag_field="kind", tag="swap", frozen=True, omit_defaults=True):
    """A sampler took new weights, from `began` to `ended`. `published`: when they were asked of the policy."""

    version: int
    published: float
    began: float
    ended: float
    nbytes: int


class Step(msgspec.Struct, tag_field="kind", tag="step", frozen=True, omit_defaults=True):
    """A step of the script, as `run.steps` counts them; its numbers are in metrics.jsonl."""

    step: int
    began: float
    ended: float


class Delivery(msgspec.Struct, tag_field="kind", tag="delivery", frozen=True, omit_defaults=True):
    """A stream of rollouts gave a batch."""

    batch: int
    at: float
    rows: int
    staleness: list[int]
    """How many rows are 0, 1, 2, ... versions behind."""
    dropped: Mapping[str, int] = {}
    """Groups dropped since the batch before, by why."""


class Restart(msgspec.Struct, tag_field="kind", tag="restart", frozen=True, omit_defaults=True):
    """The run was begun again, after a fault of a machine had ended it."""

    at: float
    number: int
    """From 1: how often it was, since the command was started."""
    error: str
    """What ended it, as a text."""


Event: TypeAlias = Call | Span | Wait | Gauge | Swap | Step | Delivery | Restart


def clock() -> float:
    """Seconds on the running event loop's clock; outside of a loop on the machine's, which loops have by default."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class Sink(Protocol):
    """Where events go."""

    def now(self) -> float:
        """Seconds since the start of the run."""
        ...

    def emit(self, event: Event) -> None:
        """Keep an event."""
        ...


class EventLog:
    """A file of events, JSON lines, written each second by the loop that it is made on.

    A run that is killed leaves whole lines, all but those of its last second. Calls and waits are events when they end;
    the waits that go on when the log is closed end with it. A long run keeps the newest: a file that is full is renamed
    to NAME-before.jsonl, in the place of the one before it.
    """

    def __init__(
        self, path: Path, most: int = 1 << 28, tell: Callable[[Sequence[Event], float], None] | None = None
    ) -> None:
        """`most`: bytes of both files. `tell`: is given what is written, and the start in seconds since 1970."""
        self.began: float = clock()
        """The start of the run, on the event loop's clock."""
        self._since = time.time()
        self._tell = tell
        self._path = path
        self._room = self._most = most // 2
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()
        self._kept: deque[Event] = deque()
        self.gauges: dict[str, float] = {}
        """What each shows now."""
        self._loop = asyncio._get_running_loop()  # noqa: SLF001 -- None where none runs, without an exception
        self._timer: asyncio.TimerHandle | None = None
        self._due = False
        """Whether the timer runs or was asked for, maybe from another thread."""

    def now(self) -> float:
        """Seconds since the start of the run."""
        return clock() - self.began

    def moved(self, folder: Path) -> None:
        """The file is in this folder now."""
        self._path = folder / self._path.name

    def emit(self, event: Event) -> None:
        """Keep an event; it is written within a second, while the loop runs. From any thread."""
        self._kept.append(event)
        if isinstance(event, Gauge):
            self.gauges[event.name] = event.value
        if not self._due and self._loop is not None:
            self._due = True
            if asyncio._get_running_loop() is self._loop:  # noqa: SLF001
                self._start_timer()
            else:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._start_timer)

    def _start_timer(self) -> None:
        # Only while something is kept: in virtual time, where nothing else can happen, a timer would hide that.
        if self._kept and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what is kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = False
        kept = [self._kept.popleft() for _ in range(len(self._kept))]
        if kept:
            lines = self._encoder.encode_lines(kept)
            if len(lines) > self._room:
                self._file.close()
                self._path.rename(self._path.with_stem(f"{self._path.stem}-before"))
                self._file, self._room = self._path.open("wb"), self._most
            self._file.write(lines)
            self._file.flush()
            self._room -= len(lines)
            if self._tell:
                self._tell(kept, self._since)

    def close(self) -> None:
        """Write the rest, with the waits that go on, up to now. Nothing is kept from here on."""
        for pending in list(Pending.table.values()):
            if pending.to is self:
                pending.note()
        try:
            self.flush()
        finally:
            self._kept = deque(maxlen=0)
            self._file.close()


sink: ContextVar[Sink | None] = ContextVar("sink", default=None)
"""Where the events of the current run go; nothing is kept where there is none."""


@dataclass(frozen=True)
class Pending:
    """Somebody waits, now."""

    who: str
    what: str
    on: "str | Blocked"
    loop: asyncio.AbstractEventLoop = field(repr=False)
    to: Sink | None = field(repr=False)
    began: float
    """On the clock of `to`."""
    at_first: str
    """What `on` said in the beginning."""

    table: ClassVar[dict[int, "Pending"]] = {}
    """Everybody who waits, in the order in which they began."""

    def __str__(self) -> str:
        return f"{self.who} waits for {self.what}: {self.on if isinstance(self.on, str) else self.on()}"

    def note(self) -> None:
        """Emit the wait, up to now. One that took no time was none."""
        if self.to and (ended := self.to.now()) > self.began:
            self.to.emit(Wait(self.who, self.what, self.at_first, self.began, ended))

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> list["Pending"]:
        """Who waits on a loop."""
        return [each for each in cls.table.values() if each.loop is loop]


class Blocked(Protocol):
    """Says, when asked, what somebody is blocked by."""

    def __call__(self) -> str:
        """A clause, such as `3 of 64 groups are ready`."""
        ...


@contextmanager
def waiting(who: str, what: str, on: str | Blocked) -> Generator[None]:
    """Say that `who` waits for `what` while the block lasts: an event, and a line of the wait-for graph."""
    at_first = on if isinstance(on, str) else on()
    to = sink.get()
    pending = Pending(who, what, on, asyncio.get_running_loop(), to, to.now() if to else 0.0, at_first)
    Pending.table[id(pending)] = pending
    try:
        yield
    finally:
        del Pending.table[id(pending)]
        pending.note()


def gauge(name: str, value: float) -> None:
    """Note a number that goes up and down."""
    if to := sink.get():
        to.emit(Gauge(name, to.now(), value))
