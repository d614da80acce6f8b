"""The report page: one HTML file that contains its style, code and data, and loads nothing from a network."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshrl.observe.comparison import Comparison
from meshrl.observe.content import Content, make_content
from meshrl.observe.reading import Record

STYLES = ("theme.css", "style.css", "parts.css")
"""Style sheets in this folder."""
SCRIPTS = ("draw.js", "axes.js", "timeline.js", "gestures.js", "charts.js", "app.js")
"""The page's scripts, which `whole.js` inserts."""
_COMPARED = ("draw.js", "axes.js", "charts.js", "compare.js", "whole.js")


def render(record: Record) -> str:
    """Render the report page of a run."""
    return _page(record.name, make_content(record), STYLES, (*SCRIPTS, "whole.js"))


def render_comparison(comparison: Comparison) -> str:
    """Render the page of a comparison."""
    return _page(" · ".join(comparison.groups), comparison, (*STYLES, "compare.css"), _COMPARED)


def _page(title: str, content: Content | Comparison, styles: Sequence[str], scripts: Sequence[str]) -> str:
    data = msgspec.json.encode(content).decode()
    parts = {
        "title": _escaped(title),
        "style": joined(styles),
        # The run's text must not end the element that contains the data.
        "data": data.replace("<", "\\u003c"),
        "script": joined(scripts),
    }
    page = joined(["page.html"])
    pieces = page.split("{{")
    rest = [(name, tail) for name, _, tail in (piece.partition("}}") for piece in pieces[1:])]
    return pieces[0] + "".join(parts[name] + tail for name, tail in rest)


def joined(files: Sequence[str]) -> str:
    """Join files of this folder."""
    return "\n".join((Path(__file__).parent / file).read_text("utf-8") for file in files)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
