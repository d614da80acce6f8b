"""What a run did and does, from its folder: an HTML page, static or live, a comparison, a diagnosis, and a trace.

`read_run` reads the events and numbers. `overlap` and `idleness` say what bounded the steps and why ranks were idle,
and `run_lines` says it in text. `diagnose` says why a run did not learn, and `compare` says how runs differ. `render`
and `render_comparison` make pages, and `make_trace` makes the trace.

`Watcher` follows the files of a live run on 127.0.0.1, and sends updates to each browser. It needs `pip install
'meshrl[watch]'`, and is loaded on first use. `ask` sends a request to a run, such as to pause.
"""

from typing import TYPE_CHECKING

from meshrl.observe.analysis import (
    BOUND,
    Intervals,
    alone,
    deliveries_of,
    duration,
    idleness,
    overlap,
    run_lines,
    seconds_in,
    subtract,
    time_lines,
    union,
)
from meshrl.observe.comparison import Comparison, compare, render_comparison
from meshrl.observe.diagnosis import STEPS, Finding, diagnose
from meshrl.observe.groups import settings_of
from meshrl.observe.metric_info import metric_info
from meshrl.observe.page import render
from meshrl.observe.run_files import (
    CONTROL,
    LOOKS,
    NOW,
    PAUSED,
    REQUESTS,
    Command,
    Now,
    Record,
    Runs,
    Waits,
    ask,
    find_run,
    read_events,
    read_numbers,
    read_run,
    requested_at,
    run_to_watch,
    table_of,
)
from meshrl.observe.timeline import make_trace

if TYPE_CHECKING:
    from meshrl.observe.server import Watcher
else:
    from importlib import import_module

    from meshrl.errors import BackendError

    def __getattr__(name: str) -> object:
        if name != "Watcher":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return import_module("meshrl.observe.server").Watcher
        except ModuleNotFoundError as error:
            raise BackendError(
                f"meshrl watch needs the package {error.name!r}, which is not installed: pip install 'meshrl[watch]'"
            ) from error


__all__ = [
    "BOUND",
    "CONTROL",
    "LOOKS",
    "NOW",
    "PAUSED",
    "REQUESTS",
    "STEPS",
    "Command",
    "Comparison",
    "Finding",
    "Intervals",
    "Now",
    "Record",
    "Runs",
    "Waits",
    "Watcher",
    "alone",
    "ask",
    "compare",
    "deliveries_of",
    "diagnose",
    "duration",
    "find_run",
    "idleness",
    "make_trace",
    "metric_info",
    "overlap",
    "read_events",
    "read_numbers",
    "read_run",
    "render",
    "render_comparison",
    "requested_at",
    "run_lines",
    "run_to_watch",
    "seconds_in",
    "settings_of",
    "subtract",
    "table_of",
    "time_lines",
    "union",
]
