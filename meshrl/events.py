"""Events: what happens in a run, as JSON lines that the report, the trace and the simulator read.

Times are seconds since the start of the run, on the clock of the controller's event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import msgspec

CORES_OF: Final = "cores of "
"""The gauge with this name and the mesh's has the CPU cores of each rank of a mesh."""
_FLUSH_SECONDS: Final = 1.0


class Call(msgspec.Struct, tag_field="kind", tag="call", frozen=True, omit_defaults=True):
    """A call of an endpoint as the caller saw it, from sending to the joined result, or to the end of a stream."""

    id: int
    """Number of the call. Its spans refer to it."""
    actor: str
    """Class of the actor."""
    endpoint: str
    """Name of the endpoint."""
    began: float
    """When the call was sent."""
    ended: float
    """When its result was there."""
    rows: int | None = None
    """Rows of the batches among the arguments."""
    tokens: int | None = None
    """Tokens of these batches."""
    error: str | None = None
    """Type of the exception that it raised."""


class Span(msgspec.Struct, tag_field="kind", tag="span", frozen=True, omit_defaults=True):
    """A call as it ran on one rank."""

    call: int
    """The `id` of the call."""
    mesh: str
    """Mesh of the rank."""
    rank: int
    """Number of the rank in the mesh. Mesh and rank name the process or thread, which colocated actors share."""
    actor: str
    """Class of the actor."""
    endpoint: str
    """Name of the endpoint."""
    began: float
    """When the rank began the call."""
    ended: float
    """When the rank had ended it."""


class Wait(msgspec.Struct, tag_field="kind", tag="wait", frozen=True, omit_defaults=True):
    """A part of the run had to wait. For example, `trainer` waited for `a batch` on `3 of 64 groups are ready`."""

    who: str
    """The part that waited."""
    what: str
    """What it waited for."""
    on: str
    """What it was blocked by when the wait began, as a text."""
    began: float
    """When the wait began."""
    ended: float
    """When the wait ended."""


class Gauge(msgspec.Struct, tag_field="kind", tag="gauge", frozen=True, omit_defaults=True):
    """A number that rises and falls, such as the groups that are ready. It holds until the next gauge of its name."""

    name: str
    """Name of the number."""
    at: float
    """When it changed."""
    value: float
    """Its new value."""


class Swap(msgspec.Struct, tag_field="kind", tag="swap", frozen=True, omit_defaults=True):
    """A sampler loaded new weights."""

    version: int
    """Version of the weights."""
    published: float
    """When the weights were requested from the policy."""
    began: float
    """When the sampler began to load them."""
    ended: float
    """When the sampler had loaded them."""
    nbytes: int
    """Size of the weights in bytes."""


class Step(msgspec.Struct, tag_field="kind", tag="step", frozen=True, omit_defaults=True):
    """A step of the script, as `run.steps` counts them. Its numbers are in metrics.jsonl."""

    step: int
    """Number of the step, from 0."""
    began: float
    """When the step began."""
    ended: float
    """When the step ended."""
    loop: int = 0
    """Number of the script's call of `run.steps`, from 0."""


class Delivery(msgspec.Struct, tag_field="kind", tag="delivery", frozen=True, omit_defaults=True):
    """A stream of rollouts delivered a batch, or a part of one."""

    batch: int
    """Number of the batch, from 0."""
    at: float
    """When it was delivered."""
    rows: int
    """Rows that were delivered."""
    staleness: list[int]
    """Number of rows that are 0, 1, 2, ... publications behind."""
    dropped: Mapping[str, int] = {}
    """Number of groups that were dropped since the delivery before, by reason."""


class Restart(msgspec.Struct, tag_field="kind", tag="restart", frozen=True, omit_defaults=True):
    """The run was restarted after a machine had failed."""

    at: float
    """When it was restarted."""
    number: int
    """Number of the restart since the command was started, from 1."""
    error: str
    """The error that ended the run, as a text."""


class Request(msgspec.Struct, tag_field="kind", tag="request", frozen=True, omit_defaults=True):
    """A client's request to a server of models, from its arrival to its result. `meshrl tinker` makes them."""

    model: str
    """The model or the sampling session that it was for."""
    number: int
    """The client's number of it."""
    verb: str
    """What was asked, such as `forward_backward`."""
    tenant: str
    """Whose request it was."""
    received: float
    """When it came."""
    began: float
    """When its turn came."""
    ended: float
    """When its result was there."""
    rows: int | None = None
    """Rows that it brought, or completions that it asked for."""
    tokens: int | None = None
    """Tokens of these rows."""
    error: str | None = None
    """Why it failed."""


Event: TypeAlias = Call | Span | Wait | Gauge | Swap | Step | Delivery | Restart | Request


def clock() -> float:
    """Return seconds on the clock of the running event loop, or on the machine's monotonic clock outside of a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class EventLog:
    """A file of events as JSON lines. The event loop that it is created on writes it each second.

    A killed run leaves whole lines, and loses at most those of its last second. Calls and waits become events when they
    end. Waits that are not over when the log is closed end then. A long run keeps the newest events: a full file is
    renamed to NAME-before.jsonl, and replaces the earlier one.
    """

    def __init__(
        self, path: Path, most: int = 1 << 28, listener: Callable[[Sequence[Event], float], None] | None = None
    ) -> None:
        """`most`: bytes of both files together. `listener`: gets new events, and the log's start in Unix seconds."""
        self.began: float = clock()
        """The start of the run on the event loop's clock."""
        self._since = time.time()
        self._listener = listener
        self._path = path
        self._room = self._most = most // 2
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()
        self._kept: deque[Event] = deque()
        self.gauges: dict[str, float] = {}
        """The current value of each gauge."""
        self._loop = asyncio._get_running_loop()  # noqa: SLF001 -- None if no loop runs, without an exception
        self._timer: asyncio.TimerHandle | None = None
        self._due = False
        """True if the timer runs or was requested, perhaps from another thread."""

    def now(self) -> float:
        """Seconds since the start of the run."""
        return clock() - self.began

    def moved(self, folder: Path) -> None:
        """Note that the file has moved to this folder."""
        self._path = folder / self._path.name

    def emit(self, event: Event) -> None:
        """Keep an event. It is written within a second while the loop runs. May be called from any thread."""
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
        # Only while events are kept. In virtual time a timer would hide that nothing else can happen.
        if self._kept and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write the events that are kept."""
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
            if self._listener:
                self._listener(kept, self._since)

    def close(self) -> None:
        """Write the remaining events, and the waits up to now. Later events are ignored."""
        for pending in list(Pending.table.values()):
            if pending.to is self:
                pending.note()
        try:
            self.flush()
        finally:
            self._kept = deque(maxlen=0)
            self._listener = None  # contexts of tasks may hold the log for longer than the run
            self._file.close()


sink: ContextVar[EventLog | None] = ContextVar("sink", default=None)
"""Where the events of the current run go. None: events are not kept."""


@dataclass(frozen=True)
class Pending:
    """A wait that is not over."""

    who: str
    what: str
    on: str | Callable[[], str]
    loop: asyncio.AbstractEventLoop = field(repr=False)
    to: EventLog | None = field(repr=False)
    began: float
    """On the clock of `to`."""
    at_first: str
    """The text of `on` when the wait began."""

    table: ClassVar[dict[int, "Pending"]] = {}
    """All waits, in the order in which they began."""

    def __str__(self) -> str:
        return f"{self.who} waits for {self.what}: {self.on if isinstance(self.on, str) else self.on()}"

    def note(self) -> None:
        """Emit the wait up to now, unless it took no time."""
        if self.to and (ended := self.to.now()) > self.began:
            self.to.emit(Wait(self.who, self.what, self.at_first, self.began, ended))

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> list["Pending"]:
        """Return the waits on a loop."""
        return [each for each in cls.table.values() if each.loop is loop]


@contextmanager
def waiting(who: str, what: str, on: str | Callable[[], str]) -> Generator[None]:
    """Record that `who` waits for `what` while the block runs, as an event and as a line of the wait-for graph.

    `on`: a clause that says what it is blocked by, such as `3 of 64 groups are ready`, or returns one.
    """
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
    """Record the value of a number that rises and falls."""
    if to := sink.get():
        to.emit(Gauge(name, to.now(), value))


def tell_cores(mesh: str, cores: int) -> None:
    """Record the CPU cores of each rank of a mesh. 0 records nothing."""
    if cores:
        gauge(f"{CORES_OF}{mesh}", cores)
