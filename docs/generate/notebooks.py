"""The tutorials as pages: the text, the code and the printed results of each notebook."""

import json
from pathlib import Path
from typing import Any

FOLDER = "tutorials"


def markdown(path: Path) -> str:
    """A notebook as the text of a page. Its outputs are text alone."""
    cells: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["cells"]
    return "\n\n".join(filter(None, map(_cell, cells))) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    told = "".join(map(_printed, cell["outputs"])).strip("\n")
    return f"```python\n{text}\n```" + (f"\n\n```text\n{told}\n```" if told else "")


def _printed(output: dict[str, Any]) -> str:
    """The text of an output, which is a stream or the value of the last line."""
    text = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    return "".join(text) + ("" if output["output_type"] == "stream" else "\n")
