"""The tables of docs/neighbours.md, made of meshrl/config/neighbours.toml: `python docs/neighbours.py`."""

import re
from pathlib import Path

from meshrl.config.neighbours import Counterpart, neighbours

PAGE = Path(__file__).with_name("neighbours.md")


def table(project: str) -> str:
    """Each key of a project's beside ours."""
    rows = [f"| `{name}` | {_cell(word)} |" for name, word in neighbours()[project].items()]
    return "\n".join(["| there | here |", "|---|---|", *rows])


def written() -> str:
    """The page with its tables as the file has them."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- /\1 -->",
        lambda found: f"<!-- {found[1]} -->\n{table(found[1])}\n<!-- /{found[1]} -->",
        PAGE.read_text("utf-8"),
        flags=re.DOTALL,
    )


def _cell(word: Counterpart) -> str:
    keys = " or ".join(f"`{key}`" for key in word.keys)
    return f"{keys}{': ' if keys and word.say else ''}{word.say}" if keys else f"not there: {word.say}"


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
