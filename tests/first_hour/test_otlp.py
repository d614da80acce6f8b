"""`run.otlp`: steps, calls and waits as traces at a collector, which may be away, or never answer."""

from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import cast

import msgspec
import pytest

from meshrl import events
from meshrl.config import validate
from meshrl.errors import ConfigError
from meshrl.run import RunConfig
from meshrl.run.trackers import TrackedRun, Tracker, make_tracker
from tests.first_hour.hub_server import serve
from tests.first_hour.terminal import FAKES, SMALL, done

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

QUICK = (*FAKES, *SMALL, "run.log=[]", "prompts=4")


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers = answers
        self.status = 200
        self.closed = Event()
        self.paths: list[str] = []
        self.taken: list[ExportTraceServiceRequest] = []

    def server_close(self) -> None:
        self.closed.set()
        super().server_close()

    @property
    def spans(self) -> list[Span]:
        resources = [resource for request in self.taken for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        collector = cast("Collector", self.server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        collector.paths.append(self.path)
        if not collector.answers:
            collector.closed.wait()
            return
        collector.taken.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(collector.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Nothing is told of it."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serve(made := Collector()):
        yield made


def begun(address: str) -> Tracker:
    tracker = make_tracker("otlp")
    table = {"run": {"otlp": address}}
    tracker.begin(TrackedRun("00000000000000ab", "mine", "words", Path(), table, first_step=0, goes_on=False))
    return tracker


def run(address: str, *arguments: str) -> str:
    return done("run", "grpo/quickstart", *QUICK, f"run.otlp={address}", "run.name=mine", *arguments).err


def test_each_step_is_a_trace_of_its_waits_and_calls_down_to_ranks(collector: Collector) -> None:
    assert "takes no traces" not in run(collector.address, "steps=3", "ahead=1")
    assert {*collector.paths} == {"/v1/traces"}
    own = Path("runs/mine/run_id").read_text("utf-8").strip()
    about = {each.key: each.value.string_value for each in collector.taken[0].resource_spans[0].resource.attributes}
    assert (about["service.name"], about["meshrl.run"], about["meshrl.run_id"]) == ("meshrl", "mine", own)
    assert (about["meshrl.folder"], about["meshrl.traces"]) == (str(Path("runs/mine").resolve()), own)
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in collector.spans:
        traces[span.trace_id.hex()].append(span)
    assert sorted(traces) == [f"{own}{number:016x}" for number in range(4)]  # 0 is what was outside of steps
    for number in range(1, 4):
        spans = traces[f"{own}{number:016x}"]
        by_id = {span.span_id: span for span in spans}
        (root,) = (span for span in spans if not span.parent_span_id)
        assert root.name == f"step {number - 1}"
        updates = [span for span in spans if span.name.endswith(".update")]
        assert [by_id[span.parent_span_id] for span in updates] == [root]
        assert all(root.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano for span in updates)
    written = Path("runs/mine/events.jsonl").read_bytes().splitlines()
    kinds = [msgspec.json.decode(line)["kind"] for line in written]
    names = [span.name for span in collector.spans]
    assert sum(" waits for " in name for name in names) == kinds.count("wait") > 0
    assert sum("." in name and " on " not in name for name in names) == kinds.count("call")
    assert sum("." in name and " on " in name for name in names) == kinds.count("span")


def test_what_ran_on_a_rank_goes_with_its_call_and_a_call_that_failed_says_so(collector: Collector) -> None:
    """A stream ends in a later step than what ran for it."""
    tracker = begun(collector.address + "/")
    ran, called = ("Sampler", "generate", 0.5, 1.5), ("Sampler", "generate", 0.25, 2.5)
    tracker.events([events.Span(1, "rollout", 3, *ran), events.Step(0, 0.0, 2.0)], 1000.0)
    tracker.events([events.Call(1, *called, rows=8, error="ValueError"), events.Step(1, 2.0, 3.0)], 1000.0)
    tracker.events([events.Step(1, 3.0, 4.0, loop=1)], 1000.0)
    tracker.end({"status": "finished"}, None)
    steps = {span.name: span for span in collector.spans if not span.parent_span_id}
    assert {name: span.trace_id.hex()[16:] for name, span in steps.items()} == {
        "step 0": "0000000000000001",
        "step 1": "0000000000000002",
        "step 1 of loop 1": "0000000100000002",
    }
    spans = {span.name: span for span in collector.spans}
    call, on_rank = spans["Sampler.generate"], spans["Sampler.generate on rollout"]
    assert (call.parent_span_id, on_rank.parent_span_id) == (steps["step 1"].span_id, call.span_id)
    assert (call.start_time_unix_nano, call.end_time_unix_nano) == (1000_250_000_000, 1002_500_000_000)
    assert (call.status.code, call.status.message) == (Status.STATUS_CODE_ERROR, "ValueError")
    attributes = (*call.attributes, *on_rank.attributes)
    about = {each.key: each.value.int_value or each.value.string_value for each in attributes}
    assert about == {"meshrl.rows": 8, "meshrl.mesh": "rollout", "meshrl.rank": 3}


def test_a_collector_that_is_away_or_silent_is_told_once_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    gone = Collector()
    gone.server_close()
    silent = Collector(answers=False)
    with serve(silent):
        for address in (gone.address, silent.address):
            said = run(address, "steps=5")
            assert said.count(f"run.otlp: {address} takes no traces") == 1
            assert said.count("warning") == 1
            assert msgspec.json.decode(Path("runs/mine/summary.json").read_bytes())["status"] == "finished"
            assert len(Path("runs/mine/metrics.jsonl").read_bytes().splitlines()) == 5
        assert len(silent.paths) == 1


def test_a_refusing_collector_is_sent_what_comes_next(collector: Collector, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = begun(collector.address.replace("//", "//me:secret@"))
    for step, status in enumerate((400, 413, 200, 500)):
        collector.status = status
        tracker.events([events.Step(step, float(step), step + 1.0)], 1000.0)
    asked = len(collector.paths)
    tracker.events([events.Step(4, 4.0, 5.0)], 1000.0)
    tracker.end({"status": "finished"}, None)
    said = " ".join(capsys.readouterr().err.split())
    assert f"run.otlp: {collector.address} refuses 1 spans, which are lost; others are sent on. Its exporter" in said
    assert said.count("refuses") == 1
    assert "code: 400" in said
    assert f"run.otlp: {collector.address} takes no traces: see that a collector" in said
    assert len(collector.paths) == asked >= 4
    assert "secret" not in said


def test_traces_are_asked_for_by_an_address() -> None:
    for given, told in (({"log": "otlp"}, "set otlp ="), ({"otlp": "127.0.0.1:4318"}, "otlp")):
        with pytest.raises(ConfigError, match=told):
            validate(RunConfig, given, "test")
