"""The tables of rooms and modules in the README and in docs/tour.md, made of the docstrings: `python docs/house.py`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "meshrl"
ROOMS = (
    ("mesh", "report"),
    ("data",),
    ("engines", "weights", "losses", "objectives", "tasks"),
    ("roles",),
    ("rewards", "rollout"),
    ("environments",),
    ("run",),
    ("deprecated", "evaluation", "simulation"),
    ("testing",),
)
"""The rooms by level: each imports from levels below it alone."""


def docstring(path: Path) -> str:
    """What a module says of itself."""
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def first_line(path: Path) -> str:
    """The first line of a module's docstring, as a cell of a table has it."""
    return docstring(path).partition("\n")[0].rstrip(".").replace("|", "\\|")


def rooms() -> list[str]:
    """The rooms from the lowest level up."""
    return [room for level in ROOMS for room in level]


def tree() -> str:
    """The rooms as the README prints them."""
    lines = ["meshrl/", *(f"  {room + '/':<15}{first_line(HOUSE / room / '__init__.py')}" for room in rooms())]
    files = sorted(path for path in HOUSE.glob("*.py") if path.stem != "__init__")
    lines += [f"  {path.name:<15}{first_line(path)}" for path in files]
    return "```text\n" + "\n".join(lines) + "\n```"


def paragraphs() -> str:
    """Each room: its paragraph and its modules."""
    found: list[str] = []
    for room in rooms():
        folder = HOUSE / room
        found.append(f"### `{room}/`\n\n{docstring(folder / '__init__.py')}\n\n| Module | What it is |\n|---|---|")
        modules = sorted(path for path in folder.rglob("*.py") if not path.stem.startswith("__"))
        found[-1] += "".join(f"\n| `{path.relative_to(folder)}` | {first_line(path)} |" for path in modules)
    return "\n\n".join(found)


PAGES = {ROOT / "README.md": tree, ROOT / "docs" / "tour.md": paragraphs}
"""Each page that has such a part, between two comments, and what makes it."""


def written(page: Path) -> str:
    """A page with its part as the docstrings have it."""
    part = f"<!-- house -->\n{PAGES[page]()}\n<!-- /house -->"
    text, count = re.subn(
        r"<!-- house -->\n.*?<!-- /house -->", lambda _: part, page.read_text("utf-8"), flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{page} has {count} parts between <!-- house --> and <!-- /house -->: it must have one")
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), "utf-8")
