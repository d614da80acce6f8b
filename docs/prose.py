"""The English of the pages and docstrings: checks it, and measures how readable each page is.

python docs/prose.py           # checks the pages, the docstrings and the table; exit status 1 if something is wrong
python docs/prose.py --table   # writes docs/readability.md: today's figures next to the first ones
"""

import ast
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from inspect import cleandoc
from itertools import count
from pathlib import Path
from typing import NamedTuple

from proselint.checks import __register__
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TABLE = DOCS / "readability.md"
RULES = tomllib.loads((DOCS / "prose.toml").read_text("utf-8"))
LONG = 30
"""Words from which on a sentence is long."""


class Figures(NamedTuple):
    """How readable a page is."""

    words: float
    sentence: float
    """Words of one, on average."""
    long: float
    """Per cent of the sentences."""
    ease: float

    def __str__(self) -> str:
        """As the table has them."""
        return " | ".join(f"{value:g}" for value in self)


WORST = Figures(words=math.inf, sentence=15, long=3, ease=0)
"""No page may have more words a sentence, or more long ones."""
NEAR = Figures(words=0.3, sentence=1, long=2, ease=4)
"""How far the table may be from a page that was edited since: words as a share, the rest as it stands."""
_HEAD = f"""# How readable the pages are

`python docs/prose.py --table` writes this table. Code counts as one word, and a long sentence has more than 30. Reading
ease is Flesch's: higher for shorter words and sentences, about 60 for plain English, 30 for academic prose. An arrow
leads from a page's first figure to today's.

`make prose` refuses a page with more than {WORST.sentence:g} words a sentence or {WORST.long:g} % long ones. It also
refuses this table if it no longer fits the pages.

| Page | Words | Words a sentence | Long sentences, % | Reading ease |
|---|---|---|---|---|
"""


def pages() -> list[Path]:
    """The pages that people read: not the table itself."""
    outside = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "CHANGELOG.md", "examples/README.md")
    inside = (path for path in DOCS.rglob("*.md") if path != TABLE)
    return [*(ROOT / name for name in outside), *sorted(inside)]


def prose(text: str, headings: str = r"\1.", *, tables: bool = False) -> str:
    r"""A page's text, each line where it was, without code blocks, targets of links and marks.

    A piece of code is a word that is like no other. `headings`: what takes the place of one, `\1` being its text.
    `tables`: keep them.
    """
    numbers = count()

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"^ *(```+).*?^ *\1 *$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"^    .*$" if tables else r"^    .*$|^ *\|.*$", blank, text, flags=re.MULTILINE)
    text = re.sub(r"(`+)(?:.+?)\1", lambda _: f"c{next(numbers)}", text, flags=re.DOTALL)
    text = re.sub(r"^#+ (.*)$", headings, text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)|!\[|\[|\*\*", "", text)


def found(page: Path) -> Iterator[str]:
    """Yield the mistakes of a page, one in each line."""
    text = page.read_text("utf-8")
    for check, (line, _) in LintFile(source=page, content=prose(text)).lint():
        if not check.check_path.startswith(tuple(RULES["proselint"])):
            yield f"{page.relative_to(ROOT)}:{line}: {' '.join(check.message.split())} ({check.check_path})"
    yield from turns(page, prose(text, tables=True))
    now = figures(page)
    if now.sentence > WORST.sentence or now.long > WORST.long:
        yield (
            f"{page.relative_to(ROOT)}: {now.sentence:g} words a sentence and {now.long:g} % long ones; at most "
            f"{WORST.sentence:g} and {WORST.long:g} %: divide long sentences"
        )


def turns(path: Path, text: str, first: int = 1) -> Iterator[str]:
    """Yield the words of a text that the project does not use. `first`: the number of its first line in the file."""
    for pattern, instead in RULES["words"].items():
        for match in re.finditer(pattern, text):
            line = first + text.count("\n", 0, match.start())
            yield f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: {instead} (docs/prose.toml)"


def found_in_docstrings(path: Path) -> Iterator[str]:
    """Yield such words in the docstrings of a Python file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from turns(path, prose(cleandoc(node.value.value)), node.lineno)


def stale() -> Iterator[str]:
    """What the table says of pages that it no longer fits, each in one line."""
    told = {name: Figures(*(float(cell.rpartition(" → ")[2]) for cell in cells)) for name, cells in _rows()}
    now = {page.relative_to(ROOT).as_posix(): figures(page) for page in pages()}
    for name in sorted({*told, *now}):
        if name not in told or name not in now or not _near(told[name], now[name]):
            was, is_ = (found.get(name, "nothing") for found in (told, now))
            yield f"docs/readability.md: {name} has {is_}, not {was}: run `python docs/prose.py --table`"


def _near(told: Figures, now: Figures) -> bool:
    away = [abs(one - other) for one, other in zip(told, now, strict=True)]
    return all(gap <= most for gap, most in zip([away[0] / now.words, *away[1:]], NEAR, strict=True))


def figures(page: Path) -> Figures:
    """How readable a page is."""
    text = prose(page.read_text("utf-8"), headings="")
    blocks = re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text)
    sentences = [words for block in blocks for part in re.split(r"[.!?](?=\s|$)", block) if (words := _words(part))]
    words = [word for sentence in sentences for word in sentence]
    mean = len(words) / len(sentences)
    ease = 206.835 - 1.015 * mean - 84.6 * sum(map(_syllables, words)) / len(words)
    long = 100 * sum(len(sentence) > LONG for sentence in sentences) / len(sentences)
    return Figures(len(words), round(mean, 1), round(long), round(ease))


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][\w'-]*", text)


def _syllables(word: str) -> int:
    """Groups of vowels, without an `e` that nobody hears."""
    word = word.lower()
    groups = len(re.findall(r"[aeiouy]+", word))
    silent = word.endswith("e") and not word.endswith(("le", "ee")) and groups > 1
    return max(1, groups - silent)


def table() -> str:
    """The table of all pages; what it has of before stays."""
    before = {name: [cell.partition(" → ")[0] for cell in cells] for name, cells in _rows()}
    rows: list[str] = []
    for page in pages():
        name, now = page.relative_to(ROOT).as_posix(), figures(page)
        then = before.get(name, [f"{value:g}" for value in now])
        cells = [
            first if first == f"{value:g}" else f"{first} → {value:g}" for first, value in zip(then, now, strict=True)
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)


def _rows() -> Iterator[tuple[str, list[str]]]:
    for line in TABLE.read_text("utf-8").splitlines():
        if row := re.match(r"\| `(.+?)` \| (.*) \|$", line):
            yield row[1], row[2].split(" | ")


def main() -> None:
    """Check the pages, or write the table."""
    if sys.argv[1:] == ["--table"]:
        TABLE.write_text(table(), "utf-8")
        return
    CheckRegistry().register_many(__register__)
    sources = [
        path for folder in ("meshrl", "backends", "algorithms") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    mistakes = [mistake for page in pages() for mistake in found(page)]
    mistakes += [mistake for path in sources for mistake in found_in_docstrings(path)] + [*stale()]
    print("\n".join(mistakes) or f"prose: nothing found in {len(pages())} pages and {len(sources)} Python files")
    sys.exit(bool(mistakes))


if __name__ == "__main__":
    main()
