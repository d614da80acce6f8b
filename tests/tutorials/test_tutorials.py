"""The notebooks of docs/tutorials run as they stand, and print what they show. As a script, it writes what they print.

Numbers may differ from machine to machine: the words around them do not.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="make test-tutorials installs it")
nbclient = pytest.importorskip("nbclient", reason="make test-tutorials installs it")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def run(path: Path, folder: Path) -> Any:
    """Execute a notebook in a folder of its own."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def printed(notebook: Any) -> list[str]:
    """What each cell of code prints, without what goes to the standard error."""
    found: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            texts = (each.text if each.output_type == "stream" else each.data["text/plain"] for each in cell.outputs)
            found.append("".join(texts))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    shown, now = (printed(each) for each in (nbformat.read(path, as_version=4), run(path, tmp_path)))
    words = [[re.sub(r"[-+]?\d+(?:\.\d+)?", "N", text) for text in each] for each in (shown, now)]
    assert words[0] == words[1]
    assert sum(map(len, shown)) < 3000, "its results stay small"


def write(folder: Path) -> None:
    """Write what the notebooks print into them."""
    for path in NOTEBOOKS:
        notebook = run(path, folder)
        printed(notebook)
        for number, cell in enumerate(each for each in notebook.cells if each.cell_type == "code"):
            cell.execution_count, cell.metadata = number + 1, {}
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = number + 1
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        path.write_text(nbformat.writes(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
