"""What a run did and does, from its folder: an HTML page, static or live, a comparison, a diagnosis, and a trace.

`read_run` reads the events and numbers. `overlap` and `idleness` say what bounded the steps and why ranks were idle,
and `run_lines` says it in text. `diagnose` says why a run did not learn, and `compare` says how runs differ. `render`
and `render_comparison` make pages, and `make_trace` makes the trace.

`Watcher` follows the files of a live run on 127.0.0.1, and sends updates to each browser. It needs `pip install
'meshrl[watch]'`, and is loaded on first use. `ask` sends a request to a run, such as to pause.
"""

from typing import TYPE_CHECKING

from meshrl.observe.analysis import (
    BOUND as BOUND,
    Intervals as Intervals,
    alone as alone,
    deliveries_of as deliveries_of,
    duration as duration,
    idleness as idleness,
    overlap as overlap,
    run_lines as run_lines,
    seconds_in as seconds_in,
    subtract as subtract,
    time_lines as time_lines,
    union as union,
)
from meshrl.observe.comparison import (
    Comparison as Comparison,
    compare as compare,
    render_comparison as render_comparison,
)
from meshrl.observe.diagnosis import STEPS as STEPS, Finding as Finding, diagnose as diagnose
from meshrl.observe.groups import settings_of as settings_of
from meshrl.observe.metric_info import metric_info as metric_info
from meshrl.observe.page import render as render
from meshrl.observe.run_files import (
    CONTROL as CONTROL,
    LOOKS as LOOKS,
    NOW as NOW,
    PAUSED as PAUSED,
    REQUESTS as REQUESTS,
    Command as Command,
    RunStatus as RunStatus,
    Record as Record,
    Runs as Runs,
    Waits as Waits,
    ask as ask,
    find_run as find_run,
    read_events as read_events,
    read_numbers as read_numbers,
    read_run as read_run,
    requested_at as requested_at,
    run_to_watch as run_to_watch,
    table_of as table_of,
)
from meshrl.observe.timeline import make_trace as make_trace

if TYPE_CHECKING:
    from meshrl.observe.server import Watcher as Watcher
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
