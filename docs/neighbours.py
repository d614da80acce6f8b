"""The tables of keys in docs/from-*.md, made of meshrl/config/neighbours.toml: `python docs/neighbours.py`."""

import re
from pathlib import Path

from meshrl.config.neighbours import Counterpart, neighbours

PAGES = {project: Path(__file__).with_name(f"from-{project}.md") for project in neighbours()}


def table(project: str) -> str:
    """Each key of a project's beside ours."""
    rows = [f"| `{name}` | {_cell(word)} |" for name, word in neighbours()[project].items()]
    return "\n".join(["| there | here |", "|---|---|", *rows])


def written(project: str) -> str:
    """A project's page with the table as the file has it."""
    between = f"<!-- {project} -->\n{table(project)}\n<!-- /{project} -->"
    text = PAGES[project].read_text("utf-8")
    return re.sub(rf"<!-- {project} -->\n.*?<!-- /{project} -->", lambda _: between, text, flags=re.DOTALL)


def _cell(word: Counterpart) -> str:
    keys = " or ".join(f"`{key}`" for key in word.keys)
    return f"{keys}{': ' if keys and word.say else ''}{word.say}" if keys else f"not there: {word.say}"


if __name__ == "__main__":
    for project, page in PAGES.items():
        page.write_text(written(project), "utf-8")
