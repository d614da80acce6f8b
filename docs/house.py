"""The rooms of the core, made of its sources: a table in docs/tour.md, and the picture docs/house.svg.

python docs/house.py
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "meshrl"
ROOMS = (
    ("config",),
    ("mesh", "observe"),
    ("data",),
    ("engines", "algo"),
    ("roles",),
    ("tasks", "remote"),
    ("overlap",),
    ("agents",),
    ("run",),
    ("testing", "tinker"),
    ("planning",),
    ("cli",),
)
"""The rooms by level: each imports from levels below it alone."""


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a module."""
    return ast.parse(path.read_text("utf-8"))


def docstring(path: Path) -> str:
    """What a module says of itself."""
    return ast.get_docstring(parsed(path)) or ""


def first_line(path: Path) -> str:
    """The first line of a module's docstring, as a cell of a table has it."""
    return docstring(path).partition("\n")[0].rstrip(".").replace("|", "\\|")


def rooms() -> list[str]:
    """The rooms from the lowest level up."""
    return [room for level in ROOMS for room in level]


def paragraphs() -> str:
    """Each room: its paragraph and its modules; then the modules that every room may use."""
    found: list[str] = []
    for room in rooms():
        folder = HOUSE / room
        found.append(f"### `{room}/`\n\n{docstring(folder / '__init__.py')}\n\n| Module | What it is |\n|---|---|")
        modules = sorted(path for path in folder.rglob("*.py") if not path.stem.startswith("__"))
        found[-1] += "".join(f"\n| `{path.relative_to(folder)}` | {first_line(path)} |" for path in modules)
    beside = sorted(path for path in HOUSE.glob("*.py") if path.stem != "__init__")
    rows = "".join(f"\n| `{path.name}` | {first_line(path)} |" for path in beside)
    return "\n\n".join([*found, f"### Modules outside the rooms\n\n| Module | What it is |\n|---|---|{rows}"])


def imported() -> dict[str, set[str]]:
    """By room, the rooms that its modules import from."""
    found: dict[str, set[str]] = {}
    for room in rooms():
        trees = [parsed(path) for path in sorted((HOUSE / room).rglob("*.py"))]
        names = [node.module or "" for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        others = {name.split(".")[1] for name in names if name.startswith("meshrl.")}
        found[room] = {other for other in others if other in rooms() and other != room}
    return found


def arrows() -> list[tuple[str, str]]:
    """From a room to those below that it imports from, but for what another of them leads to."""
    below = imported()

    def reached(room: str) -> set[str]:
        return below[room].union(*(reached(other) for other in below[room]))

    return [
        (room, other)
        for room in rooms()
        for other in sorted(below[room])
        if not any(other in reached(between) for between in below[room] - {other})
    ]


def picture() -> str:
    """The rooms by level, the lowest at the bottom, with an arrow for each import that no other leads to."""
    width, height, gap = 108, 36, 84
    size = max(len(level) for level in ROOMS)
    whole, tall = size * (width + 24) + 24, len(ROOMS) * gap
    places: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(ROOMS):
        for at, room in enumerate(level):
            left = (whole - len(level) * (width + 24)) / 2 + at * (width + 24) + 12
            places[room] = left + width / 2, tall - (number + 0.5) * gap
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {tall}">',
        '<g font-family="sans-serif" font-size="15">',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0 0L8 4L0 8z" fill="#7a8694"/></marker>',
        f'<rect width="{whole}" height="{tall}" fill="#fbfcfd"/>',
    ]
    for room, other in arrows():
        (x1, y1), (x2, y2) = places[room], places[other]
        start, end = y1 + height / 2, y2 - height / 2
        bend = (start + end) / 2
        lines.append(
            f'<path d="M{x1:g} {start:g}C{x1:g} {bend:g} {x2:g} {bend:g} {x2:g} {end:g}" fill="none" stroke="#7a8694" '
            'stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in places.items():
        lines += [
            f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" rx="6"',
            ' fill="#e3edf7" stroke="#36546f"/>',
            f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle" fill="#16283a">{room}</text>',
        ]
    return "\n".join([*lines, "</g></svg>"]) + "\n"


PICTURE = ROOT / "docs" / "house.svg"
PAGE = ROOT / "docs" / "tour.md"
"""Has the tables between two comments."""


def written() -> str:
    """The page with its part as the docstrings have it."""
    part = f"<!-- house -->\n{paragraphs()}\n<!-- /house -->"
    text, count = re.subn(
        r"<!-- house -->\n.*?<!-- /house -->", lambda _: part, PAGE.read_text("utf-8"), flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} parts between <!-- house --> and <!-- /house -->: it must have one")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
    PICTURE.write_text(picture(), "utf-8")
