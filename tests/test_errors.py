"""Each row of docs/errors.md is a mistake that is made here for real, with the words that meshrl has for it."""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"

Mistake: TypeAlias = Callable[[], object]
"""Raises what meshrl says, or returns it where it is told on a row; perhaps when it is awaited."""


def read_mistakes(name: str) -> Mapping[str, Mistake]:
    """Those of tests/errors/NAME.py: what is in its MISTAKES, and its functions; `unknown_key` is `unknown-key`."""
    own = vars(import_module(f"tests.errors.{name}"))
    functions = {
        name.replace("_", "-"): value
        for name, value in own.items()
        if inspect.isfunction(value) and value.__module__ == own["__name__"] and not name.startswith("_")
    }
    return {**functions, **own.get("MISTAKES", {})}


def read_table() -> dict[str, str]:
    """The third cell of each row of the page, by the first."""
    found: dict[str, str] = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and (row := re.fullmatch(r"`([a-z-]+)`", cells[0])):
            assert row[1] not in found, f"{row[1]} is in the table twice"
            found[row[1]] = cells[2]
    return found


NAMES = sorted(path.stem for path in (ROOT / "tests" / "errors").glob("*.py"))
TABLE = read_table()


def say(mistake: Mistake) -> str:
    try:
        outcome = mistake()
        if inspect.iscoroutine(outcome):
            outcome = asyncio.run(outcome)
    except Exception as error:  # noqa: BLE001 -- which one it is stands in the table
        return f"{type(error).__name__}: {error}"
    assert isinstance(outcome, str), "nothing was said"
    return outcome


def plain(text: str, folder: Path) -> str:
    text = text.replace(str(folder), "/home/me").replace(str(ROOT), "/home/me/meshrl")
    return re.sub(r"(?<=0x)[0-9a-f]+|(?<=_bootstrap>, line )\d+", "...", text)


def written(line: str) -> str:
    line = line.strip().replace("|", r"\|")
    return f"`` {line} ``" if "`" in line else f"`{line}`"


def as_cell(text: str, like: str) -> str:
    """A message as the table has it: whole, or as many lines as `like` where that ends in an ellipsis."""
    lines = [line for line in text.splitlines() if line.strip()]
    cut = like.endswith(" …")
    shown = lines[: like.count("<br>") + 1] if cut else lines
    return "<br>".join(map(written, shown)) + " …" * cut


@pytest.mark.parametrize("name", NAMES)
def test_meshrl_says_what_the_table_says(name: str, tmp_path: Path) -> None:
    wrong: list[str] = []
    for row, mistake in read_mistakes(name).items():
        (folder := tmp_path / row).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            text = plain(say(mistake), folder)
        cell = as_cell(text, TABLE.get(row, ""))
        if cell != TABLE.get(row):
            wrong.append(f"the third cell of the row {row} in docs/errors.md should be\n{cell}")
    assert not wrong, "\n".join(wrong)


def test_each_row_is_made_as_one_mistake() -> None:
    made = [row for name in NAMES for row in read_mistakes(name)]
    assert sorted(made) == sorted(TABLE)
