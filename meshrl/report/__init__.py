"""Reports of what a run did, from its folder: an HTML page, and a trace for Perfetto.

`read_run` reads the events and numbers. `overlap` and `idleness` say what bounded the steps and why ranks were idle,
and `run_lines` says it in text. `diagnose` says why a run did not learn, and `compare` says how runs differ. `render`
and `render_comparison` make pages, and `make_trace` makes the trace.
"""

from meshrl.report.analysis import idleness, overlap
from meshrl.report.comparison import Comparison, compare
from meshrl.report.content import Content, make_content
from meshrl.report.diagnosis import STEPS, Finding, diagnose
from meshrl.report.groups import settings_of
from meshrl.report.intervals import Intervals, alone, seconds_in, subtract, union
from meshrl.report.page import SCRIPTS, STYLES, joined, render, render_comparison
from meshrl.report.reading import FILES, Line, Record, find_run, read_events, read_numbers, read_run
from meshrl.report.text import BOUND, deliveries_of, duration, run_lines, time_lines
from meshrl.report.trace import make_trace

__all__ = [
    "BOUND",
    "FILES",
    "SCRIPTS",
    "STEPS",
    "STYLES",
    "Comparison",
    "Content",
    "Finding",
    "Intervals",
    "Line",
    "Record",
    "alone",
    "compare",
    "deliveries_of",
    "diagnose",
    "duration",
    "find_run",
    "idleness",
    "joined",
    "make_content",
    "make_trace",
    "overlap",
    "read_events",
    "read_numbers",
    "read_run",
    "render",
    "render_comparison",
    "run_lines",
    "seconds_in",
    "settings_of",
    "subtract",
    "time_lines",
    "union",
]
