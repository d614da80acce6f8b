"""Each row of docs/errors.md is a mistake that is made here for real, with the words that meshrl has for it."""

import asyncio
import importlib.util
import inspect
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeAlias, cast

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"

Mistake: TypeAlias = Callable[[], str | Coroutine[None, None, str | None] | None]
"""Raises what meshrl says, or returns it where it is told on a row."""


def read_mistakes() -> dict[str, Mistake]:
    """The functions of tests/errors/*.py; `unknown_key` is the row `unknown-key`."""
    found: dict[str, Mistake] = {}
    for path in sorted((ROOT / "tests" / "errors").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"meshrl_mistakes_{path.stem}", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                row = name.replace("_", "-")
                assert row not in found, f"{row} is made twice"
                found[row] = cast("Mistake", value)
    return found


def read_table() -> dict[str, str]:
    """The third cell of each row of the page, by the first."""
    found: dict[str, str] = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and (row := re.fullmatch(r"`([a-z-]+)`", cells[0])):
            assert row[1] not in found, f"{row[1]} is in the table twice"
            found[row[1]] = cells[2]
    return found


MISTAKES = read_mistakes()
TABLE = read_table()


def say(mistake: Mistake) -> str:
    """Make the mistake and return what meshrl says."""
    try:
        outcome = mistake()
        if inspect.iscoroutine(outcome):
            outcome = asyncio.run(outcome)
    except Exception as error:  # noqa: BLE001 -- which one it is stands in the table
        return f"{type(error).__name__}: {error}"
    assert isinstance(outcome, str), "nothing was said"
    return outcome


def plain(text: str, folder: Path) -> str:
    """The message without what differs from one run or one Python to the next."""
    text = text.replace(str(folder), "/home/me").replace(str(ROOT), "/home/me/meshrl")
    return re.sub(r"(?<=0x)[0-9a-f]+|(?<=_bootstrap>, line )\d+", "...", text)


def written(line: str) -> str:
    """A line of a message as code in a Markdown table."""
    line = line.strip().replace("|", r"\|")
    return f"`` {line} ``" if "`" in line else f"`{line}`"


def as_cell(text: str, like: str) -> str:
    """A message as the table has it: whole, or as many lines as `like` where that ends in an ellipsis."""
    lines = [line for line in text.splitlines() if line.strip()]
    cut = like.endswith(" …")
    shown = lines[: like.count("<br>") + 1] if cut else lines
    return "<br>".join(map(written, shown)) + " …" * cut


@pytest.mark.parametrize("row", MISTAKES)
def test_meshrl_says_what_the_table_says(row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = plain(say(MISTAKES[row]), tmp_path)
    assert row in TABLE, f"docs/errors.md has no row {row}; its third cell would be\n{as_cell(text, '')}"
    cell = as_cell(text, TABLE[row])
    assert cell == TABLE[row], f"the third cell of the row {row} in docs/errors.md should be\n{cell}"


def test_each_row_is_made_as_a_mistake() -> None:
    assert TABLE.keys() - MISTAKES.keys() == set()
