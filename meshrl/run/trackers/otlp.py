"""OpenTelemetry, through its SDK: a trace for each step, over HTTP. OTEL_EXPORTER_OTLP_HEADERS and others work."""

import logging
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from random import Random
from typing import Final, TypeAlias, cast
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span as Sent
from opentelemetry.trace import StatusCode, set_span_in_context

from meshrl import log
from meshrl.events import Call, Event, Span, Step, Wait
from meshrl.run.trackers.base import TrackedRun, Tracker

_MOST: Final = 50_000
"""Events kept of a step in progress at most. Beyond that the oldest are lost."""
_AT_ONCE: Final = 2_000
"""Spans per request."""
_AWAY: Final = 30.0
"""Seconds to wait after a collector has taken nothing."""
_REFUSED: Final = re.compile(r"\bcode: 4(?!08|29)\d\d\b")
"""Matches statuses that a retry does not change, in the exporter's messages: 4xx except 408 and 429."""

Timed: TypeAlias = Call | Span | Wait


class Otlp(Tracker):
    """Sends a trace per step: the step, its calls and waits, and within each call what ran on which rank.

    A step is sent when it has ended, with what ended in it. Trace ids begin with the run's id.
    """

    wants_events = True

    def begin(self, run: TrackedRun) -> None:
        """Open the connection to the collector at `run.otlp`."""
        # The exporter logs every attempt. These messages are reported once, here.
        self._exporter_log = _LastMessage()
        logging.getLogger("opentelemetry").addHandler(self._exporter_log)
        address = str(cast("Mapping[str, object]", run.config["run"])["otlp"])
        parts = urlsplit(address)
        self._shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        """The address without user and password."""
        self._exporter: SpanExporter = OTLPSpanExporter(f"{address.rstrip('/')}/v1/traces")
        about = {f"meshrl.{name}": value for name, value in run.links.items()}
        own = {"service.name": run.project or "meshrl", "meshrl.run": run.name, "meshrl.run_id": run.id}
        self._ids = _Ids(run.id)
        self._ended = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource.create(own | about), id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer("meshrl")
        self._kept: deque[Timed] = deque(maxlen=_MOST)
        self._began = 0.0
        self._alone_until = 0.0
        self._warned: set[str] = set()

    def events(self, events: Sequence[Event], began: float) -> None:
        """Send the steps that have ended."""
        self._began = began
        timed = [event for event in events if isinstance(event, Timed)]
        if len(self._kept) + len(timed) > _MOST:
            self._warn("gets", f"no more than the newest {_MOST:,} events of a step: see `meshrl trace` for the others")
        self._kept.extend(timed)
        for step in (event for event in events if isinstance(event, Step)):
            self._send(self._taken(step.began))
            self._send(self._taken(step.ended), step)

    def end(self, summary: Mapping[str, object], report: Path | None) -> None:
        """Send events after the last step."""
        self._send(self._taken(inf))
        self._exporter.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self._exporter_log)

    def _taken(self, until: float) -> Sequence[Timed]:
        """The events that ended until then. Spans on ranks go with their call, which ends later."""
        calls = {event.id for event in self._kept if isinstance(event, Call) and event.ended <= until}
        taken: list[Timed] = []
        for _ in range(len(self._kept)):
            event = self._kept.popleft()
            goes = event.call in calls if isinstance(event, Span) and until < inf else event.ended <= until
            (taken if goes else self._kept).append(event)
        return taken

    def _send(self, events: Sequence[Timed], step: Step | None = None) -> None:
        """Send a step's trace, or what ran outside of steps."""
        if not events and step is None:
            return
        self._ids.step = step
        began = step.began if step else min(event.began for event in events)
        ended = step.ended if step else max(event.ended for event in events)
        name = f"step {step.step}{f' of loop {step.loop}' if step.loop else ''}" if step else "outside of steps"
        root = self._tracer.start_span(name, start_time=self._at(began))
        calls = {event.id: self._child(root, event) for event in events if isinstance(event, Call)}
        for event in events:
            if not isinstance(event, Call):
                parent = calls.get(event.call, root) if isinstance(event, Span) else root
                self._child(parent, event).end(self._at(event.ended))
        for event in events:
            if isinstance(event, Call):
                calls[event.id].end(self._at(event.ended))
        root.end(self._at(ended))
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        self._export(spans)

    def _child(self, parent: Sent, event: Timed) -> Sent:
        name, numbers = _described(event)
        attributes = {f"meshrl.{key}": value for key, value in numbers.items() if value is not None}
        began = self._at(event.began)
        child = self._tracer.start_span(name, set_span_in_context(parent), attributes=attributes, start_time=began)
        if isinstance(event, Call) and event.error:
            child.set_status(StatusCode.ERROR, event.error)
        return child

    def _at(self, seconds: float) -> int:
        return int((self._began + seconds) * 1e9)

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans. Drop those that the collector refuses, and all while it is unavailable."""
        for first in range(0, len(spans), _AT_ONCE):
            if time.monotonic() < self._alone_until:
                return
            some = spans[first : first + _AT_ONCE]
            self._exporter_log.last = ""
            if self._exporter.export(some) is SpanExportResult.SUCCESS:
                continue
            message = self._exporter_log.last
            if _REFUSED.search(message):
                self._warn("refuses", f"{len(some):,} spans, which are lost; others are sent on", message)
                continue
            self._alone_until = time.monotonic() + _AWAY
            self._warn(
                "takes no",
                "traces: see that a collector for OTLP over HTTP is there. Steps are left out until it does; it is "
                f"asked every {_AWAY:g} s",
                message,
            )

    def _warn(self, problem: str, advice: str, message: str = "") -> None:
        """Report a problem once, with the exporter's message if it has one."""
        if problem not in self._warned:
            exporter = f". Its exporter says: {message}" if message else ""
            log.warning(f"run.otlp: {self._shown} {problem} {advice}{exporter}")
        self._warned.add(problem)


class _LastMessage(logging.Handler):
    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, shortened and without an address's user and password."""
        self.last = re.sub(r"//[^/\s@]*@", "//", record.getMessage())[:500]


def _described(event: Timed) -> tuple[str, Mapping[str, str | int | None]]:
    if isinstance(event, Call):
        return f"{event.actor}.{event.endpoint}", {"rows": event.rows, "tokens": event.tokens}
    if isinstance(event, Span):
        return f"{event.actor}.{event.endpoint} on {event.mesh}", {"mesh": event.mesh, "rank": event.rank}
    return f"{event.who} waits for {event.what}", {"blocked_by": event.on}


class _Ids(IdGenerator):
    """Ids of spans, independent of the program's random numbers, and of traces, made of run, loop and step."""

    def __init__(self, run: str) -> None:
        self._run = int(run, 16)
        self._random = Random()
        self.step: Step | None = None
        """Step of the next trace. None outside of steps."""

    def generate_span_id(self) -> int:
        """A 64-bit number other than 0."""
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """The run's id in 64 bits, the number of the loop from 0 in 32, and that of the step from 1 in 32."""
        return (self._run << 64) + ((self.step.loop << 32) + self.step.step + 1 if self.step else 0)
